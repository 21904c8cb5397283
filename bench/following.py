"""The choice of engines in several gateway processes: what it costs, how long a call waits for it, and how even the engines are.

All processes are in this one, with their own pools and programs, and what they tell each other is packed and unpacked as on their
links; engines are slots in which calls run for so many ticks. *alone*: each process knows its own calls alone, as without tables.
*plan*: they place by the coordinator's tables. Definitions:

- *decisions/s*: calls that were given an engine, over the CPU seconds of that (asking and leaving included);
- *added*: from asking for an engine to having it, while one is free, of calls that come at the same moment, a tick's worth;
- *fullest*: the calls in the fullest engine over the mean of all, averaged over the ticks after the first third;
- *table*: CPU of making, packing, unpacking and taking one table for one process, and its bytes.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench.report import Steps, finish, machine, number, percentile, show
from gateway.control.follower_placement import FollowerPlacement
from gateway.peers.messages import (
    counts_from_json,
    counts_to_json,
    pack,
    table_from_json,
    table_to_json,
    unpack,
)
from gateway.rollout.call import Call
from gateway.rollout.plan_messages import CallCounts, Table, others_of
from gateway.rollout.pool import EnginePool
from gateway.rollout.slot import Run, Slot
from gateway.sections import QueueSettings
from gateway.types import Sampling
from scheduler.policies.placement import Rule
from scheduler.program.calls import EngineSeen, Plan
from scheduler.program.placement import PlacementSettings

_TICKS_A_TABLE = 10
"""A tick stands for a tenth of a second: a table comes once a second."""
_PROMPT = np.zeros(512, np.int32)


@dataclass(frozen=True, slots=True)
class Load:
    """The engines and calls of every run."""

    engines: int
    ticks: int
    calls: int
    """Calls that begin in one tick, in all processes together."""
    mean_ticks: int
    skew: float
    """A process gets so many times the calls of the one before."""
    seed: int = 1


@dataclass
class Process:
    """A gateway process: its pool, and the calls that run, by the tick in which they end."""

    pool: EnginePool
    placement: FollowerPlacement | None = None
    running: deque[tuple[int, Call, Slot]] = field(default_factory=deque)


@dataclass
class Result:
    """Sums of one run."""

    calls: int = 0
    cpu_s: float = 0.0
    added_s: list[float] = field(default_factory=list)
    fullest: list[float] = field(default_factory=list)
    table_s: list[float] = field(default_factory=list)
    table_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "calls": self.calls,
            "decisions_per_cpu_s": self.calls / self.cpu_s,
            "us_per_call": 1e6 * self.cpu_s / self.calls,
            "added_ms_p50": 1e3 * (percentile(self.added_s, 50) or 0.0),
            "added_ms_p99": 1e3 * (percentile(self.added_s, 99) or 0.0),
            "fullest_to_mean": sum(self.fullest) / len(self.fullest),
            "table_us": 1e6 * (percentile(self.table_s, 50) or 0.0),
            "table_bytes": self.table_bytes,
        }


def _open(load: Load) -> EnginePool:
    pool = EnginePool("bench", QueueSettings(max_waiting=1_000_000))
    for number_ in range(load.engines):
        slot = pool.slots[f"engine-{number_:03}"] = Slot(f"engine-{number_:03}")
        slot.hold()
        slot.confirm(0)
    pool.notify()
    return pool


class Cluster:
    """All processes, and the tables between them."""

    def __init__(self, load: Load, processes: int, rule: Rule, *, plan: bool) -> None:
        self.load = load
        self.processes = [Process(_open(load)) for _ in range(processes)]
        settings = PlacementSettings.of({"rule": rule})
        if plan:
            for process in self.processes:
                process.placement = FollowerPlacement("bench", process.pool, settings)
        self.result = Result()
        self._random = random.Random(load.seed)
        self._names = count()
        self._weights = [load.skew**number_ for number_ in range(processes)]

    async def run(self) -> Result:
        """Runs the load."""
        for tick in range(self.load.ticks):
            if tick % _TICKS_A_TABLE == 0:
                self._tables()
            await self._tick(tick)
            if tick > self.load.ticks // 3:
                inside = self._inside()
                self.result.fullest.append(max(inside) * len(inside) / max(1, sum(inside)))
        return self.result

    def _inside(self) -> list[int]:
        names = list(self.processes[0].pool.slots)
        return [sum(process.pool.slots[name].streams for process in self.processes) for name in names]

    async def _tick(self, now: int) -> None:
        begun: list[tuple[Process, Call]] = []
        for process in self._random.choices(self.processes, self._weights, k=self.load.calls):
            name = f"call-{next(self._names)}"
            begun.append((process, Call(name, _PROMPT, Sampling(max_tokens=64), episode_id=name)))
        before = time.process_time()
        for process in self.processes:
            while process.running and process.running[0][0] <= now:
                _, call, slot = process.running.popleft()
                del slot.runs[call.call_id]
                process.pool.release(call)
        found = await asyncio.gather(*(self._acquire(process, call) for process, call in begun))
        self.result.cpu_s += time.process_time() - before
        self.result.calls += len(begun)
        for (process, call), slot in zip(begun, found, strict=True):
            slot.runs[call.call_id] = Run(call, slot, call.call_id, 0.0)
            ends = now + 1 + int(self._random.expovariate(1 / self.load.mean_ticks))
            process.running.append((ends, call, slot))
        for process in self.processes:
            process.running = deque(sorted(process.running, key=lambda one: one[0]))

    async def _acquire(self, process: Process, call: Call) -> Slot:
        asked = time.perf_counter()
        slot = await process.pool.acquire(call)
        self.result.added_s.append(time.perf_counter() - asked)
        return slot

    def _tables(self) -> None:
        if self.processes[0].placement is None:
            return
        counts = [process.pool.counts() for process in self.processes]
        inside = self._inside()
        seen = tuple(
            EngineSeen(name, running, 0, running * 512, 20.0 * running)
            for name, running in zip(self.processes[0].pool.slots, inside, strict=True)
        )
        table = Table(seen, Plan(0))
        for process, own in zip(self.processes, counts, strict=True):
            assert process.placement is not None
            before = time.process_time()
            others = others_of([_travelled(one) for one in counts if one is not own])
            sent = pack(table_to_json(replace(table, others=others)))
            process.placement.apply_table(table_from_json(unpack(sent)))
            self.result.table_s.append(time.process_time() - before)
            self.result.table_bytes = max(self.result.table_bytes, len(sent))


def _travelled(counts: CallCounts) -> CallCounts:
    """The counts as another process gets them."""
    return counts_from_json(unpack(pack(counts_to_json(counts))))


def main(
    processes: Annotated[str, typer.Option(help="How many gateway processes, with commas.")] = "1,2,4",
    engines: Annotated[int, typer.Option(min=1, help="Engines.")] = 32,
    ticks: Annotated[int, typer.Option(min=10, help="Tenths of a second that are played.")] = 600,
    calls: Annotated[int, typer.Option(min=1, help="Calls that begin in a tick, in all processes.")] = 32,
    mean_ticks: Annotated[int, typer.Option(min=1, help="How long a call takes, on average.")] = 50,
    skew: Annotated[
        float, typer.Option(min=1.0, help="Each process has so many times the calls of the one before.")
    ] = 1.5,
    rule: Annotated[Rule, typer.Option(help="[routing] rule.")] = "gain",
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path(
        "runs/bench/following.json"
    ),
) -> None:
    """Measure the choice of engines in several gateway processes, alone and by one plan.

    Example: python -m bench.following --processes 2,4 --engines 8
    """
    load = Load(engines, ticks, calls, mean_ticks, skew)
    runs = [(int(n), plan) for n in processes.split(",") for plan in (False, True)]
    before, results = machine(), list[dict[str, Any]]()
    with Steps(len(runs)) as steps:
        for number_, plan in runs:
            kind = "plan" if plan else "alone"
            steps.begin(f"{number_} processes, {kind}")
            result = asyncio.run(_measure(load, number_, rule, plan))
            results.append({"processes": number_, "kind": kind, **result.to_json()})
    _show(results, load, rule)
    report = {
        "bench": "following",
        "command": " ".join(["python -m bench.following", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "engines": engines,
        "rule": rule,
        "results": results,
    }
    finish(report, out)


async def _measure(load: Load, processes: int, rule: Rule, plan: bool) -> Result:
    return await Cluster(load, processes, rule, plan=plan).run()


def _show(results: list[dict[str, Any]], load: Load, rule: str) -> None:
    rows = [
        [
            f"{result['processes']}, {result['kind']}",
            number(result["decisions_per_cpu_s"]),
            number(result["added_ms_p50"]),
            number(result["added_ms_p99"]),
            number(result["fullest_to_mean"]),
            number(result["table_us"]),
            number(result["table_bytes"]),
        ]
        for result in results
    ]
    header = [
        "processes",
        "decisions/s of a core",
        "added ms p50",
        "p99",
        "fullest to mean",
        "table us",
        "bytes",
    ]
    note = f"{load.engines} engines, {load.calls} calls a tick that take {load.mean_ticks}, rule {rule}"
    show("The choice of engines in several processes", header, rows, note)


if __name__ == "__main__":
    typer.run(main)
