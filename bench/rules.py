"""Bounds on staleness under the same load: what is trained per second, what is wasted, and how stale it is.

One gateway after another, each with another `[staleness]`, a fake engine that takes a fixed time per token, agents whose
replies have log-normal lengths (the same tasks in the same order with the same lengths), and a trainer that takes a fixed time
per token and does nothing else. Definitions:

- *trained*: sampled tokens in the batches that were acknowledged, over the time from the first lease to the last ack;
- *wasted*: sampled tokens of episodes and groups that were given up (dropped, aborted, expired), as a share of wasted + trained;
  what still runs or waits at the end counts for neither;
- *staleness*: of every trained token, the batch's number less the version that sampled it;
- *idle*: the share of that time in which the trainer waited for a batch.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench import model
from bench.processes import Child, serve_gateway
from bench.report import Steps, finish, machine, number, show
from gateway.client import EpisodeRunner, GatewayClient, Task
from gateway.client.agents import FunctionAgent
from gateway.types import Group
from tests.harness.weights import publish

RULES = {"synchronous": 0, "staleflow": 2, "overtake": 2}
"""Each bound with its eta; `overtake` bounds tokens (`late_groups = "overtake"`), the others groups."""
_LONGEST = 1500
_TASKS = 4000
_BLOCK = {"first": 10, "size": 64}
"""Weights that never end a reply of themselves, so that a reply is as long as it was drawn."""
_SPENT = "dropped", "aborted"


@dataclass(frozen=True, slots=True)
class Load:
    """The load that every rule gets."""

    batches: int
    batch: int
    group: int
    concurrency: int
    delay_s: float
    train_s: float
    """Per token."""
    median: int
    sigma: float
    seed: int

    def config(self, rule: str, eta: int) -> str:
        """The tables of the gateway's file that are this bench's own."""
        late = "overtake" if rule == "overtake" else "cancel"
        return (
            f"[engine]\nlaunch = 'fake'\nargs = ['--delay-s', '{self.delay_s}']\n"
            f"[staleness]\nlate_groups = '{late}'\neta = {eta}\nbatch = {self.batch}\nmin_members = 1\n"
        )

    def lengths(self) -> dict[str, Iterator[int]]:
        """The lengths of every task's replies, in tokens."""
        draws = random.Random(self.seed)

        def draw() -> int:
            return min(_LONGEST, max(1, round(self.median * math.exp(self.sigma * draws.gauss(0, 1)))))

        return {f"t{n}": iter([draw() for _ in range(self.group)]) for n in range(_TASKS)}


@dataclass(slots=True)
class Result:
    """The results of one rule."""

    rule: str
    eta: int
    tokens: int = 0
    seconds: float = 0.0
    idle_s: float = 0.0
    wasted: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def add(self, groups: list[Group], buffer: int) -> None:
        """Counts a batch."""
        for node in (n for g in groups for e in g.episodes for n in e.nodes if n.sampled):
            self.tokens += len(node.ids)
            self.staleness.update((buffer - node.versions).tolist())

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        total = sum(self.staleness.values())
        return {
            "rule": self.rule,
            "eta": self.eta,
            "trained_tokens": self.tokens,
            "seconds": round(self.seconds, 2),
            "tokens_per_s": self.tokens / self.seconds,
            "wasted_share": self.wasted / (self.wasted + self.tokens),
            "staleness_mean": sum(s * n for s, n in self.staleness.items()) / total,
            "staleness_max": max(self.staleness),
            "staleness": {str(s): n for s, n in sorted(self.staleness.items())},
            "idle_share": self.idle_s / self.seconds,
        }


class SlowTrainer:
    """Leases, waits as long as training would take, publishes the next version and acknowledges."""

    def __init__(self, client: GatewayClient, load: Load, weights: Weights) -> None:
        self._client = client
        self._load = load
        self._weights = weights

    async def run(self, result: Result, steps: Steps) -> None:
        """Trains `batches` batches."""
        started = time.perf_counter()
        for version in range(1, self._load.batches + 1):
            steps.begin(f"{result.rule}: batch {version}")
            waited = time.perf_counter()
            lease = await self._client.lease("bench")
            groups: list[Group] = []
            cursor, complete = 0, False
            while not complete:
                fetched = await self._client.leased_groups(lease, cursor, wait_s=20.0)
                await self._client.renew(lease)
                groups += fetched.groups
                cursor, complete = fetched.cursor, fetched.complete
            result.idle_s += time.perf_counter() - waited
            before = result.tokens
            result.add(groups, lease.buffer)
            await asyncio.sleep((result.tokens - before) * self._load.train_s)
            await self._publish(version)
            await self._client.ack(lease, "none")
        result.seconds = time.perf_counter() - started

    async def _publish(self, version: int) -> None:
        record = await self._client.publish(version, str(self._weights.version(version)), wait_s=60.0)
        if record["state"] != "live":
            raise RuntimeError(f"version {version} is {record['state']}: {record['report']}")


class Weights:
    """Versions for the fake engine, in one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.first = root / "v0"
        model.save_model(self.first)
        (self.first / "block.json").write_text(json.dumps(_BLOCK))

    def version(self, number: int) -> Path:
        """The folder of a version above 0."""
        path = self._root / f"v{number}"
        return path if path.exists() else publish(self.first, path, number, number - 1)


def main(
    rules: Annotated[str, typer.Option(help="Which, with commas.")] = ",".join(RULES),
    batches: Annotated[int, typer.Option(min=2, help="Batches that each rule trains.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Groups in a batch.")] = 8,
    group: Annotated[int, typer.Option(min=1, help="Episodes in a group.")] = 4,
    concurrency: Annotated[int, typer.Option(min=1, help="Agents at once.")] = 96,
    delay_s: Annotated[float, typer.Option(min=0.001, help="What a token takes the engine.")] = 0.01,
    train_s: Annotated[float, typer.Option(min=0.0, help="What a token takes the trainer.")] = 0.0015,
    median: Annotated[int, typer.Option(min=1, help="The median reply, in tokens.")] = 64,
    sigma: Annotated[float, typer.Option(min=0.0, help="Of the logarithm of the lengths.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = 1,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/rules.json"),
) -> None:
    """Compare the rules of staleness under the same load: trained tokens/s, wasted tokens, staleness.

    Examples:

      python -m bench.rules

      python -m bench.rules --rules synchronous,staleflow --sigma 1.5
    """
    chosen = rules.split(",")
    if unknown := set(chosen) - set(RULES):
        raise typer.BadParameter(f"no rule {', '.join(sorted(unknown))}; there are {', '.join(RULES)}")
    load = Load(batches, batch, group, concurrency, delay_s, train_s, median, sigma, seed)
    import uvloop

    before = machine()
    with Steps(len(chosen) * batches) as steps:
        results = [result.to_json() for result in uvloop.run(_bench(chosen, load, steps))]
    _show(results)
    report = {
        "bench": "rules",
        "command": " ".join(["python -m bench.rules", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "results": results,
    }
    finish(report, out)


async def _bench(rules: list[str], load: Load, steps: Steps) -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        weights = Weights(Path(folder))
        for rule in rules:
            work = Path(folder) / rule
            work.mkdir()
            async with serve_gateway(weights.first, load.config(rule, RULES[rule]), work) as gateway:
                result = await _measure(rule, load, weights, gateway, steps)
            result.wasted = wasted(next(work.glob("*.db")))
            results.append(result)
    return results


async def _measure(rule: str, load: Load, weights: Weights, gateway: Child, steps: Steps) -> Result:
    result, stop = Result(rule, RULES[rule]), asyncio.Event()
    lengths = load.lengths()
    limits = httpx.Limits(
        max_connections=None, keepalive_expiry=2.0
    )  # the gateway closes idle ones after 5 s
    async with GatewayClient(gateway.url) as client, httpx.AsyncClient(timeout=300.0, limits=limits) as http:

        async def reply(task: dict[str, Any], base_url: str, api_key: str) -> float:
            body = {
                "model": "bench",
                "messages": [{"role": "user", "content": task["task_id"]}],
                "max_tokens": next(lengths[task["task_id"]]),
            }
            headers = {"authorization": f"Bearer {api_key}"}
            response = await http.post(f"{base_url}/chat/completions", json=body, headers=headers)
            response.raise_for_status()
            return float(len(response.content) % 2)

        runner = EpisodeRunner(
            client, FunctionAgent(reply), group_size=load.group, concurrency=load.concurrency, retries=0
        )
        tasks = [Task(name, {"task_id": name}) for name in lengths]
        agents = asyncio.create_task(runner.run_forever(tasks, stop), name="agents")
        trainer = asyncio.create_task(SlowTrainer(client, load, weights).run(result, steps), name="trainer")
        done, _ = await asyncio.wait({agents, trainer}, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        agents.cancel()
        await asyncio.wait({agents})
        for task in done:
            task.result()
    return result


def wasted(database: Path) -> int:
    """Sampled tokens of the episodes and groups that were given up."""
    with sqlite3.connect(database) as connection:
        tokens = dict(
            connection.execute("SELECT episode_id, sum(completion_tokens) FROM calls GROUP BY episode_id")
        )
        group_of = dict(connection.execute("SELECT id, group_id FROM episodes"))
        kinds = defaultdict(set)
        for kind, group_id, episode_id in connection.execute(
            "SELECT kind, group_id, episode_id FROM decisions"
        ):
            kinds[kind].add(episode_id or group_id)
    gone = set().union(*(kinds[kind] for kind in _SPENT))
    return sum(tokens.get(episode, 0) for episode, group in group_of.items() if {episode, group} & gone)


def _show(results: list[dict[str, Any]]) -> None:
    rows = [
        [
            result["rule"],
            str(result["eta"]),
            number(result["tokens_per_s"]),
            number(result["tokens_per_s"] / results[0]["tokens_per_s"]),
            f"{result['wasted_share']:.1%}",
            f"{result['staleness_mean']:.2f}",
            str(result["staleness_max"]),
            f"{result['idle_share']:.0%}",
        ]
        for result in results
    ]
    header = [
        "rule",
        "eta",
        "trained tokens/s",
        "to the first",
        "wasted",
        "staleness, mean",
        "max",
        "trainer idle",
    ]
    note = "log-normal lengths, fake engine, simulated trainer"
    show("Rules of staleness under the same load", header, rows, note)


if __name__ == "__main__":
    typer.run(main)
