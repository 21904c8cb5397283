"""Measures the control program's share of one core at many engines and open calls.

The program of a gateway with one trained model receives, in virtual time, what its gateway would report: every few milliseconds
the calls that began and ended, every second a snapshot of all engines and how full the batch is. Calls that it moves arrive a
second time. Most of an episode's later call is cached in the engine of the one before.

A first run generates the events. A second program gets the same events and makes the same decisions; only its CPU time counts
(checking, deciding, recording). Weight updates of the engines are left out: they are seconds apart.
"""

from __future__ import annotations

import gc
import heapq
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.report import Steps, finish, machine, number, show
from scheduler.policies.placement import Rule
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import (
    BatchReady,
    Consume,
    Event,
    Join,
    Leased,
    Publish,
    Refuse,
    Reward,
)
from scheduler.policies.staleness_state import LedgerSettings
from scheduler.program import ControlProgram
from scheduler.program.calls import Arrived, CallDeparted, Demand, EngineLoad, Move, Opened, Placed, Snapshot
from scheduler.program.nodes import Filling
from scheduler.reactor import MILLISECOND, SECOND, PhysicalAction, Recording, Runtime, VirtualClock

GOAL = 0.05
_MODEL = "model"
_PROMPT, _SAMPLED = 2000, 3000
_CACHED = 1500
"""Tokens of a later call that its episode's engine has."""
_FILL = 1000
"""Calls that arrive together while the program is filled."""


@dataclass(frozen=True, slots=True)
class Plan:
    engines: int
    calls: int
    """Calls that are open at the same time, each in an episode of its own."""
    call_s: float
    episode_calls: int
    group: int
    tick_ms: int
    rule: Rule = "gain"


@dataclass(frozen=True, slots=True)
class Input:
    """An event from outside: when (ns), of what kind, through which action."""

    time: int
    kind: str
    action: str
    value: Any


class Load:
    """Episodes that make calls and end, and a program that gets their events. Keeps these events."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.inputs: list[Input] = []
        self.moved = self.arrived = self.left = self.refused = 0
        self.program = built(plan)
        self.clock = VirtualClock()
        self.runtime = Runtime(self.program, self.clock)
        self._placement = self.program.placements[_MODEL]
        # It has room for every open episode
        limits = LedgerSettings(eta=15, batch=max(1, plan.calls // plan.group // 4))
        self._rule = StaleFlow(limits)
        self.runtime.observe(self._placement.placed, lambda _, placed: self._on_placed(placed))
        self.runtime.observe(self._placement.moves, lambda _, moves: self._on_moves(moves))
        self._random = random.Random(5)
        self._names = count()
        self._where: dict[str, str] = {}
        self._running = {f"engine-{number:04}": 0 for number in range(plan.engines)}
        self._ends: list[tuple[float, str, int]] = []
        self._moved_calls: list[Arrived] = []

    def fill(self) -> None:
        """Open the engines and the calls. Not measured."""
        self.runtime.start()
        for engine in self._running:
            self._inject("open", self._placement.opened, Opened(engine, 0))
        left = self.plan.calls
        while left > 0:
            born = [
                self._begin(name, self._random.randint(1, self.plan.episode_calls))
                for name in self._episodes(min(left, _FILL))
            ]
            self._inject("fill", self._placement.demand, Demand((), tuple(born)))
            left -= len(born)
        self.moved = self.arrived = self.left = self.refused = 0

    def run(self, seconds: float) -> None:
        """Run the load for `seconds` of virtual time."""
        tick, begin = self.plan.tick_ms * MILLISECOND, self.clock.now()
        for now in range(begin + tick, begin + int(seconds * SECOND) + 1, tick):
            self.runtime.run_until(now)
            self._tick(now / SECOND)
            if now // SECOND > (now - tick) // SECOND:
                engines = [EngineLoad(*engine) for engine in self._snapshot()]
                self._inject("snapshot", self._placement.snapshot, Snapshot(tuple(engines)))
                filling = Filling.of(_MODEL, self._rule, self.placed)
                self._inject("batch", self.program.lending.filling, filling)

    def _snapshot(self) -> Iterator[tuple[str, int, int, int, float]]:
        for name, running in self._running.items():
            yield name, running, 0, running * (_PROMPT + _SAMPLED // 2), running * 30.0

    @property
    def placed(self) -> int:
        """Calls that are in an engine."""
        return len(self._where)

    def _tick(self, now_s: float) -> None:
        left, arrived = [], self._moved_calls
        self._moved_calls = []
        ended = 0
        while self._ends and self._ends[0][0] <= now_s:
            _, call, rest = heapq.heappop(self._ends)
            engine = self._where.pop(call, None)
            if engine is not None:
                self._running[engine] -= 1
            left.append(CallDeparted(call, _PROMPT + _SAMPLED))
            if rest:
                arrived.append(self._begin(call.rpartition("/")[0], rest, engine or ""))
            else:
                self._decide(Reward(call.rpartition("/")[0], float(self._random.random() < 0.5)))
                ended += 1
        arrived += [self._begin(episode, self.plan.episode_calls) for episode in self._episodes(ended)]
        self.left += len(left)
        self.arrived += len(arrived)
        ended_calls = {one.call for one in left}
        arrived = [one for one in arrived if one.call not in ended_calls]
        if not left and not arrived:
            return
        self._inject("calls", self._placement.demand, Demand(tuple(left), tuple(arrived)))

    def _episodes(self, count_: int) -> list[str]:
        """Return new ones, as far as the ledger admits them."""
        found = []
        for _ in range(count_):
            number = next(self._names)
            episode = f"episode-{number:08}"
            self._decide(Join(f"group-{number // self.plan.group:07}", episode, self.plan.group))
            found.append(episode)
        return found

    def _begin(self, episode: str, calls: int, cached_in: str = "") -> Arrived:
        call = f"{episode}/{calls}"
        seconds = self._random.expovariate(
            1 / self.plan.call_s
        )  # without a memory, so the load is steady from the start
        heapq.heappush(self._ends, (self.clock.now() / SECOND + seconds, call, calls - 1))
        return Arrived(call, 0, _PROMPT, cached_in=cached_in, cached=_CACHED if cached_in else 0)

    def _decide(self, event: Event) -> None:
        events = deque([event])
        while events:
            commands = self._rule.apply(events.popleft())
            self.refused += any(isinstance(command, Refuse) for command in commands)
            for batch in [command.batch for command in commands if isinstance(command, BatchReady)]:
                events += (Leased(batch), Publish(batch + 1), Consume(batch))

    def _inject(self, kind: str, action: PhysicalAction[Any], value: Any) -> None:
        self.inputs.append(Input(self.clock.now(), kind, action.path, value))
        self.runtime.inject(action, value)
        self.runtime.advance()

    def _on_placed(self, placed: tuple[Placed, ...]) -> None:
        for one in placed:
            self._where[one.call] = one.engine
            self._running[one.engine] += 1

    def _on_moves(self, moves: tuple[Move, ...]) -> None:
        for move in moves:
            if self._where.pop(move.call, None) is not None:
                self._running[move.engine] -= 1
            self.moved += 1
            self._moved_calls.append(Arrived(move.call, 0, _PROMPT + _SAMPLED // 2))


def built(plan: Plan) -> ControlProgram:
    """Return the program of one model."""
    return ControlProgram({"models": {_MODEL: {"placement": {"choice": {"rule": plan.rule}}}}})


class Replayed:
    """A recorded program of its own that gets the same events."""

    def __init__(self, plan: Plan, path: Path) -> None:
        self._program, self._clock = built(plan), VirtualClock()
        self._recording = Recording.open(path, {})
        self._runtime = Runtime(self._program, self._clock, self._recording)
        self._runtime.start()
        self.seconds: dict[str, float] = {}
        """Wall-clock seconds by kind of event."""

    def replay(self, inputs: Iterable[Input]) -> float:
        """Replay the events. Return the CPU seconds."""
        runtime, elements, clock = self._runtime, self._program.elements, self._clock
        seconds, before = self.seconds, time.process_time()
        for event in inputs:
            if event.time > clock.now():
                runtime.run_until(event.time)
            started = time.perf_counter()
            action: Any = elements[event.action]
            runtime.inject(action, event.value)
            runtime.advance()
            seconds[event.kind] = seconds.get(event.kind, 0.0) + time.perf_counter() - started
        return time.process_time() - before

    def close(self) -> None:
        """End the run."""
        self._recording.close()


def measure(plan: Plan, seconds: float, folder: Path) -> dict[str, Any]:
    """Measure a plan. Return rates per second of virtual time, and the share of one core."""
    load, path = Load(plan), folder / "control.jsonl"
    load.fill()
    filled = len(load.inputs)
    load.run(seconds)
    second = Replayed(plan, path)
    second.replay(load.inputs[:filled])
    second.seconds.clear()
    size = path.stat().st_size
    gc.collect()
    cpu_s = second.replay(load.inputs[filled:])
    second.close()
    events = Counter(one.kind for one in load.inputs[filled:])
    wall = sum(second.seconds.values())
    cpu = {kind: part / wall * cpu_s for kind, part in second.seconds.items()}
    return {
        "share_of_a_core": cpu_s / seconds,
        "goal": GOAL,
        "shares": {kind: part / seconds for kind, part in cpu.items()},
        "events_per_s": {kind: number_ / seconds for kind, number_ in events.items()},
        "arrived_per_s": load.arrived / seconds,
        "left_per_s": load.left / seconds,
        "moved_per_s": load.moved / seconds,
        "refused_per_s": load.refused / seconds,
        "us_per_call": 1e6 * cpu.get("calls", 0.0) / max(1, load.arrived),
        "ms_per_snapshot": 1e3 * cpu.get("snapshot", 0.0) / max(1, events["snapshot"]),
        "open_calls": load.placed,
        "recording_mb_per_s": (path.stat().st_size - size) / 1e6 / seconds,
    }


def main(
    engines: Annotated[int, typer.Option(min=1, help="Engines.")] = 1024,
    calls: Annotated[int, typer.Option(min=8, help="Open calls.")] = 100_000,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of virtual time.")] = 30.0,
    call_s: Annotated[float, typer.Option(min=0.1, help="How long a call takes, on average.")] = 100.0,
    episode_calls: Annotated[int, typer.Option(min=1, help="Calls of an episode.")] = 4,
    group: Annotated[int, typer.Option(min=1, help="Episodes of a group.")] = 8,
    tick_ms: Annotated[
        int, typer.Option(min=1, max=1000, help="Milliseconds between two reports of calls.")
    ] = 10,
    rule: Annotated[Rule, typer.Option(help="[routing] rule; late calls count more with `gain`.")] = "gain",
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/control.json"),
) -> None:
    """Measure the control program's share of one core, recorded, in virtual time (so the load is simulated, the CPU time is not).

    Example: python -m bench.control --engines 64 --calls 5000 --seconds 5
    """
    before, plan = machine(), Plan(engines, calls, call_s, episode_calls, group, tick_ms, rule)
    with Steps(1) as steps, tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        steps.begin(f"{engines} engines, {calls} calls")
        result = measure(plan, seconds, Path(folder))
    rows = [
        [name.replace("_", " "), number(value)]
        for name, value in result.items()
        if not isinstance(value, dict)
    ]
    rows += [
        [f"{kind}: events a second, share of a core", f"{number(rate)}, {number(result['shares'][kind])}"]
        for kind, rate in result["events_per_s"].items()
    ]
    show(
        f"The control program at {engines} engines and {calls:,} open calls, rule {rule}",
        ["figure", "value"],
        rows,
        f"calls of {call_s:g} s on average, reported every {tick_ms} ms; recorded; simulated load, measured CPU time",
    )
    report = {
        "bench": "control",
        "command": " ".join(["python -m bench.control", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "engines": engines,
        "calls": calls,
        "rule": rule,
        **result,
    }
    finish(report, out)


if __name__ == "__main__":
    typer.run(main)
