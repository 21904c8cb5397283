"""Measures whether the gateway's memory grows with the calls that it has served.

A gateway, recording on, before the mock engine, which responds immediately. Agents open an episode, make some calls, every third
of them streamed, and close it, over and over. The resident size of the gateway's process is read as the calls go by. `rss_growth`
is the size after the last call over that after the first `--base`: by default 100,000 over 20,000.

Sizes are medians over a tenth of `--base` calls before each of the two points: an allocator gives memory back as it likes.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from bench.load import Connection, RequestFailed, connect, events_of
from bench.model import save_model
from bench.processes import Child, run_gateway, run_mock
from bench.report import Steps, finish, machine, number, show
from bench.targets import GatewayTarget, Prompts
from headgate.client import GatewayClient

_STEPS = 100
_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a run."""

    calls: int
    base: int
    connections: int
    calls_per_episode: int


@dataclass(slots=True)
class Point:
    """The resident size after a number of calls."""

    calls: int
    seconds: float
    rss_mib: float
    cpu_s: float


@dataclass(slots=True)
class _Run:
    """One gateway under its agents."""

    plan: Plan
    gateway: Child
    prompts: Prompts
    steps: Steps
    started: float = field(default_factory=time.perf_counter)
    begun: int = 0
    calls: int = 0
    points: list[Point] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Make all calls."""
        self._note()
        async with GatewayClient(self.gateway.url) as client, asyncio.TaskGroup() as agents:
            for n in range(self.plan.connections):
                agents.create_task(self._agent(client, n), name=f"agent-{n}")

    async def _agent(self, client: GatewayClient, index: int) -> None:
        connection = await connect(self.gateway.port)
        for n in count():
            if self.begun >= self.plan.calls:
                break
            episode = await client.open_episode(f"memory-{index}-{n}", mode="eval")
            target = GatewayTarget(self.gateway.port, self.prompts, [episode.api_key])
            for call in range(self.plan.calls_per_episode):
                if self.begun >= self.plan.calls:
                    break
                self.begun += 1
                connection = await self._call(connection, target, index, streamed=call % 3 == 2)
            await client.reward(episode.episode_id, 1.0)
        connection.close()

    async def _call(
        self, connection: Connection, target: GatewayTarget, index: int, *, streamed: bool
    ) -> Connection:
        try:
            status, body, _, _ = await connection.post(target.request(index, _TOKENS, streamed))
            if status != 200:
                raise RequestFailed(f"{status} {body[:200].decode(errors='replace')}")
            target.count(events_of(body) if streamed else [body], streamed)
        except (RequestFailed, TimeoutError) as error:
            self.failures[str(error) or type(error).__name__] += 1
            connection.close()
            connection = await connect(self.gateway.port)
        self.calls += 1
        if self.calls % max(1, self.plan.calls // _STEPS) == 0:
            self._note()
        return connection

    def _note(self) -> None:
        seconds = time.perf_counter() - self.started
        self.points.append(Point(self.calls, seconds, self.gateway.rss_mib(), self.gateway.cpu_s()))
        if self.calls:
            self.steps.begin(f"{self.calls:,} calls: {self.points[-1].rss_mib:.1f} MiB")


def main(
    calls: Annotated[int, typer.Option(min=100, help="Calls in all.")] = 100_000,
    base: Annotated[
        int, typer.Option(min=10, help="Calls after which the memory is compared with.")
    ] = 20_000,
    connections: Annotated[int, typer.Option(min=1, help="Concurrent agents.")] = 32,
    calls_per_episode: Annotated[int, typer.Option(min=1, help="Calls before an episode is closed.")] = 6,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/memory.json"),
) -> None:
    """Measure the gateway's resident memory as it serves 100,000 calls. The goal: within 5% of what it was after 20,000.

    The report's `series` is ready to plot: calls, seconds, rss_mib and cpu_s, each a list.

    Example: python -m bench.memory --calls 5000 --base 1000
    """
    if base >= calls:
        raise typer.BadParameter("must be below --calls", param_hint="--base")
    import uvloop

    plan, before = Plan(calls, base, connections, calls_per_episode), machine()
    with Steps(1 + calls // max(1, calls // _STEPS)) as steps:
        run = uvloop.run(_bench(plan, steps))
    series = run.points
    at_base, at_end = size_at(series, base, base / 10), size_at(series, calls, base / 10)
    rows = [
        [f"{point.calls:,}", number(point.seconds), number(point.rss_mib, 4)] for point in _tenths(series)
    ]
    show(
        "The gateway's resident memory, recording on",
        ["calls", "seconds", "MiB"],
        rows,
        f"{number(at_end, 4)} MiB at the end over {number(at_base, 4)} after {base:,}; failed: {sum(run.failures.values())}",
    )
    report = {
        "bench": "memory",
        "command": " ".join(["python -m bench.memory", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "series": {
            name: [getattr(p, name) for p in series] for name in ("calls", "seconds", "rss_mib", "cpu_s")
        },
        "rss_mib_base": at_base,
        "rss_mib_end": at_end,
        "failures": dict(run.failures),
        "failed_requests": sum(run.failures.values()),
        "seconds": round(series[-1].seconds, 1),
        "rss_growth": at_end / at_base,
    }
    finish(report, out)


async def _bench(plan: Plan, steps: Steps) -> _Run:
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        work = Path(folder)
        save_model(work / "model")
        prompts = Prompts.load(work / "model")
        gc.collect()
        gc.freeze()
        steps.begin("start the engine and the gateway")
        async with (
            run_mock(work, "--chunk-ms", "0") as engine,
            run_gateway(engine, work / "model", work) as gateway,
        ):
            run = _Run(plan, gateway, prompts, steps)
            await run.run()
            return run


def size_at(series: list[Point], calls: int, span: float) -> float:
    """Return the median size (MiB) over the last `span` calls up to N; of the nearest point if none is there."""
    near = [point.rss_mib for point in series if calls - span <= point.calls <= calls]
    return median(near) if near else min(series, key=lambda point: abs(point.calls - calls)).rss_mib


def _tenths(series: list[Point]) -> list[Point]:
    every = max(1, (len(series) - 1) // 10)
    return [point for i, point in enumerate(series) if i % every == 0 or point is series[-1]]


if __name__ == "__main__":
    typer.run(main)
