"""Placement of calls, pulls of weights and moves of calls: the defaults compared with simpler rules and with round robin.

One gateway after another, each with its own `[routing]` and `[update]`, with the same engines, agents and trainer: the same tasks
with the same log-normal lengths, episodes of several turns, a trainer that takes a fixed time per token (`slow_trainer`). The
engines are fake, with steps and prefills that take as long as measured ones, times `--slower`; or real vLLM with a tiny model
(`--launch vllm`). Rounds alternate: every arm once, then every arm once in the opposite order. Definitions:

- *recomputed*: tokens that engines prefilled again for calls that returned or moved, per trained token; *prefilled*: all
  prefilled tokens per trained token (only fake engines count them);
- *p50*, *p99*: seconds of a call; *per token*: those seconds over its tokens, p99.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench.endless import Versions
from bench.processes import ENGINE_PYTHON, Child, EnginePython, check_installed, serve_gateway
from bench.report import Spread, Steps, finish, machine, number, percentile, ranged, show, spread
from bench.slow_trainer import Load, Result, SlowTrainer, wasted
from bench.timed_engine import Costs, TimedEngine
from bench.vllm_cpu import VLLM_CPU
from gateway.engines.fake import create_fake_app
from headgate.client import (
    EpisodeRunner,
    GatewayClient,
    Task,
)
from headgate.client.agents import FunctionAgent
from headgate.processes.ports import free_port
from scheduler.policies.throughput import EngineModel

_CACHED: dict[str, dict[str, str]] = {"routing": {"rule": "cached"}, "update": {"order": "rolling"}}
_GAIN = {"rule": "gain"}
ARMS: dict[str, dict[str, dict[str, str]]] = {
    "round_robin": _CACHED,
    "cached": _CACHED,
    "gain": {**_CACHED, "routing": _GAIN},
    "pull": {**_CACHED, "update": {"order": "pull"}},
    "gain_pull": {"routing": _GAIN, "update": {"order": "pull"}},
    "gain_pull_v": {"routing": {**_GAIN, "group_version": "engine"}, "update": {"order": "pull"}},
}
"""The settings of each arm; `gain_pull` has the defaults. With `pull` calls move. `_v`: the admitting engine sets min_version."""
MEASURED = Costs(EngineModel(3.9e-7, 0.00065, 0.00016, 0.0044), 32e-6)
"""vLLM's steps and prefills with the tiny model on two cores (lab/notes/performance.md)."""
_LONGEST = 1000
_TASKS = 4000
_WORDS = (
    "sort",
    "find",
    "count",
    "list",
    "red",
    "green",
    "stones",
    "that",
    "lie",
    "near",
    "rivers",
    "and",
    "why",
)
_ROWS = (
    "tokens_per_s",
    "staleness_mean",
    "staleness_max",
    "recomputed_share",
    "prefilled_share",
    "wasted_share",
    "idle_share",
    "call_s_p50",
    "call_s_p99",
    "token_s_p99",
)


@dataclass(frozen=True, slots=True)
class Setup:
    """The engines and the load, which are the same for every arm."""

    launch: str
    engines: int
    slower: float
    slow: int
    """Engines that are half as fast as the others."""
    turns: int
    eta: int
    load: Load
    engine_python: Path = ENGINE_PYTHON

    def costs(self, number_: int) -> Costs:
        """Return the costs of the engine `number_`."""
        return MEASURED.times(self.slower * (2.0 if number_ < self.slow else 1.0))

    def tables(self, arm: str, urls: Sequence[str]) -> str:
        """Return the gateway's tables for an arm. The costs of steps are given, as a run knows them after its first minute."""
        prior = asdict(self.costs(self.engines - 1).step)
        tables: dict[str, dict[str, Any]] = {
            "engine": self._engine(urls),
            "staleness": {"eta": self.eta, "batch": self.load.batch, "min_members": 1},
            "routing": {"engine_prior": prior} if self.launch == "fake" else {},
            "update": {"probe": False},
        }
        for name, values in ARMS[arm].items():
            tables[name] = {**tables.get(name, {}), **values}
        return "".join(f"[{name}]\n{_rows(values)}" for name, values in tables.items())

    def _engine(self, urls: Sequence[str]) -> dict[str, Any]:
        if self.launch == "fake":
            return {"launch": "external", "urls": list(urls)}
        python = str(self.engine_python.absolute())
        return {"launch": "vllm", "python": python, "count": self.engines, "start_s": 180, **VLLM_CPU}


def _rows(values: dict[str, Any]) -> str:
    """Return values as rows of TOML, whose lists, numbers and strings are JSON's."""
    rows = []
    for key, value in values.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{name} = {json.dumps(one)}" for name, one in value.items())
            rows.append(f"{key} = {{ {inner} }}\n")
        else:
            rows.append(f"{key} = {json.dumps(value)}\n")
    return "".join(rows)


@dataclass(slots=True)
class ArmRun:
    """One run of an arm: the trainer's result, and the figures of calls and engines."""

    result: Result
    calls_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    prefilled: int | None = None
    recomputed: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        tokens = self.result.tokens
        return {
            **self.result.to_json(),
            "prefilled_share": None if self.prefilled is None else self.prefilled / tokens,
            "recomputed_share": None if self.recomputed is None else self.recomputed / tokens,
            "call_s_p50": percentile(self.calls_s, 50),
            "call_s_p99": percentile(self.calls_s, 99),
            "token_s_p99": percentile(self.token_s, 99),
        }


class Agents:
    """Episodes of several turns; the lengths of their replies are drawn."""

    def __init__(self, setup: Setup, http: httpx.AsyncClient, run: ArmRun) -> None:
        self._setup = setup
        self._http = http
        self._run = run
        self._lengths = self._draw()

    def _draw(self) -> dict[str, Iterator[int]]:
        load, draws = self._setup.load, random.Random(self._setup.load.seed)

        def length() -> int:
            return min(_LONGEST, max(1, round(load.median * math.exp(load.sigma * draws.gauss(0, 1)))))

        return {
            f"t{n}": iter([length() for _ in range(load.group * self._setup.turns)]) for n in range(_TASKS)
        }

    @property
    def tasks(self) -> list[Task]:
        """All tasks in order."""
        return [Task(name, {"task_id": name}) for name in self._lengths]

    async def __call__(self, task: dict[str, Any], base_url: str, api_key: str) -> float:
        """Run one episode. Its reward differs between members."""
        name, words = task["task_id"], random.Random(task["task_id"])
        messages = [{"role": "user", "content": f"{name}: " + " ".join(words.choices(_WORDS, k=40))}]
        for turn in range(self._setup.turns):
            tokens = next(self._lengths[name])
            body = {"model": "bench", "messages": messages, "max_tokens": tokens}
            began = time.perf_counter()
            response = await self._http.post(
                f"{base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {api_key}"}
            )
            response.raise_for_status()
            self._note(time.perf_counter() - began, response.json()["usage"]["completion_tokens"])
            messages += [
                response.json()["choices"][0]["message"],
                {"role": "user", "content": f"go on, part {turn + 2}"},
            ]
        return float(len(response.content) % 2)

    def _note(self, seconds: float, tokens: int) -> None:
        self._run.calls_s.append(seconds)
        self._run.token_s.append(seconds / max(1, tokens))


@asynccontextmanager
async def _serve(app: Any, port: int) -> AsyncIterator[None]:
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_keep_alive=75))
    task = asyncio.create_task(server.serve(), name=f"engine-{port}")
    try:
        while not server.started:
            if task.done():
                task.result()
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def _engines(setup: Setup, first: Path) -> AsyncIterator[tuple[list[TimedEngine], list[str]]]:
    """Return the fake engines of this process and their URLs; none for vLLM, which the gateway starts."""
    async with AsyncExitStack() as stack:
        engines, urls = [], []
        for number_ in range(setup.engines if setup.launch == "fake" else 0):
            engine, port = TimedEngine(str(first), setup.costs(number_)), free_port()
            await stack.enter_async_context(_serve(create_fake_app(engine), port))
            engines.append(engine)
            urls.append(f"http://127.0.0.1:{port}")
        yield engines, urls


async def _run(arm: str, setup: Setup, versions: Versions, work: Path, steps: Steps) -> ArmRun:
    module = "bench.round_robin" if arm == "round_robin" else "gateway.cli"
    run = ArmRun(Result(arm, setup.eta))
    async with _engines(setup, versions.first) as (engines, urls):
        async with serve_gateway(versions.first, setup.tables(arm, urls), work, module=module) as gateway:
            await _measure(setup, versions, gateway, run, steps)
        if engines:
            run.prefilled = sum(engine.prefilled for engine in engines)
            run.recomputed = sum(engine.recomputed for engine in engines)
    run.result.wasted = wasted(next(work.glob("*.db")))
    return run


async def _measure(setup: Setup, versions: Versions, gateway: Child, run: ArmRun, steps: Steps) -> None:
    load, stop = setup.load, asyncio.Event()
    limits = httpx.Limits(
        max_connections=None, keepalive_expiry=2.0
    )  # the gateway closes idle ones after 5 s
    async with GatewayClient(gateway.url) as client, httpx.AsyncClient(timeout=600.0, limits=limits) as http:
        agents = Agents(setup, http, run)
        runner = EpisodeRunner(
            client, FunctionAgent(agents), group_size=load.group, concurrency=load.concurrency, retries=0
        )
        playing = asyncio.create_task(runner.run_forever(agents.tasks, stop), name="agents")
        training = asyncio.create_task(
            SlowTrainer(client, load, versions).run(run.result, steps), name="trainer"
        )
        done, _ = await asyncio.wait({playing, training}, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        playing.cancel()
        training.cancel()
        await asyncio.wait({playing, training})
        for task in done:
            task.result()


async def _bench(
    setup: Setup, arms: Sequence[str], rounds: int, steps: Steps
) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        versions = Versions(Path(folder))
        for round_ in range(rounds):
            for arm in arms if round_ % 2 == 0 else reversed(arms):
                work = Path(folder) / f"{arm}-{round_}"
                work.mkdir()
                results[arm].append((await _run(arm, setup, versions, work, steps)).to_json())
    return results


def _spreads(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Spread | None]]:
    return {arm: {key: spread(run[key] for run in runs) for key in _ROWS} for arm, runs in results.items()}


def main(
    arms: Annotated[str, typer.Option(help="Arms, separated by commas.")] = ",".join(ARMS),
    launch: Annotated[str, typer.Option(help="fake, or vllm (`make engine`).")] = "fake",
    engines: Annotated[int, typer.Option(min=1, max=64, help="Engines.")] = 8,
    slow: Annotated[int, typer.Option(min=0, help="Fake engines that are half as fast as the others.")] = 0,
    slower: Annotated[
        float, typer.Option(min=1.0, help="Factor from the measured to the fake engines' seconds.")
    ] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 2,
    batches: Annotated[int, typer.Option(min=2, help="Batches of each run.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Groups in a batch.")] = 8,
    group: Annotated[int, typer.Option(min=1, help="Episodes in a group.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Calls of an episode.")] = 2,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent agents.")] = 96,
    train_s: Annotated[float, typer.Option(min=0.0, help="Seconds of training per token.")] = 0.0005,
    eta: Annotated[int, typer.Option(min=0, help="[staleness] eta.")] = 2,
    median: Annotated[int, typer.Option(min=1, help="The median reply, in tokens.")] = 32,
    sigma: Annotated[
        float, typer.Option(min=0.0, help="Standard deviation of the lengths' logarithm.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the lengths.")] = 1,
    engine_python: EnginePython = ENGINE_PYTHON,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/routing.json"),
) -> None:
    """Compare placements of calls, pulls and moves in one run whose rounds alternate.

    Examples:

      python -m bench.routing --engines 32 --concurrency 256 --batch 16

      python -m bench.routing --launch vllm --engines 2 --concurrency 24 --batch 4 --batches 5
    """
    chosen = arms.split(",")
    if unknown := set(chosen) - set(ARMS):
        raise typer.BadParameter(f"no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if launch == "vllm":
        check_installed(engine_python)
    load = Load(batches, batch, group, concurrency, train_s, median, sigma, seed)
    setup = Setup(launch, engines, slower, slow, turns, eta, load, engine_python)
    import uvloop

    before = machine()
    with Steps(len(chosen) * rounds * batches) as steps:
        results = uvloop.run(_bench(setup, chosen, rounds, steps))
    spreads = _spreads(results)
    _show(spreads, f"{engines} {launch} engines, {rounds} rounds, eta {eta}")
    report = {
        "bench": "routing",
        "command": " ".join(["python -m bench.routing", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "engines": engines,
        "launch": launch,
        "arms": spreads,
        "results": results,
    }
    finish(report, out)


def _show(spreads: dict[str, dict[str, Spread | None]], note: str) -> None:
    tokens = [figures["tokens_per_s"] for figures in spreads.values()]
    ratios = [number(one["median"] / tokens[0]["median"]) if one and tokens[0] else "-" for one in tokens]
    rows = [[key.replace("_", " "), *(ranged(figures[key]) for figures in spreads.values())] for key in _ROWS]
    show("Placement of calls", ["", *spreads], [["tokens/s to the first", *ratios], *rows], note)


if __name__ == "__main__":
    typer.run(main)
