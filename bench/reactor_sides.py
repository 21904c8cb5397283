"""The shared parts of `bench.reactor`'s workloads: sides, the programs' clockwork, and rounds that are played in turns.

A side plays rounds of one workload in one way and answers what came of them, the same on every side. Sides take turns, so that
what else the machine does falls on all of them, and a ratio is taken within one turn.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from bench.reactor_threads import ThreadedRuntime
from scheduler.reactor import Program, Reactor, Recording, Runtime, WallClock
from scheduler.reactor.elements import Reaction

CPUS = len(os.sched_getaffinity(0))


class Held:
    """A value that goes through ports with an array beside its recorded fields.

    An array that its sender must not touch until the next tag, for nothing copies it.
    """

    array: np.ndarray


@dataclass(frozen=True, eq=False)
class Large(Held):
    """An array whose type and shape are recorded."""

    description: str

    @classmethod
    def of(cls, array: np.ndarray) -> Self:
        """Holds `array`."""
        made = cls(cls.describe(array))
        object.__setattr__(made, "array", array)
        return made

    @staticmethod
    def describe(array: np.ndarray) -> str:
        """The text in the recording."""
        return f"{array.dtype.str}{array.shape}"


@dataclass(frozen=True, eq=False)
class Small(Large):
    """An array whose CRC-32 is recorded, so that a replay compares every bit of it."""

    @staticmethod
    def describe(array: np.ndarray) -> str:
        """The text in the recording."""
        return f"crc32 {zlib.crc32(array.data):08x}"


def opened(value: Any) -> Any:
    """The array of a value that holds one, else the value."""
    return value.array if isinstance(value, Held) else value


class Side(Protocol):
    """One way to do a workload. It is made with everything ready, as nothing before the first round counts."""

    def play(self, rounds: int) -> Any:
        """Plays so many further rounds; answers what came of them, for `==`."""

    def close(self) -> None:
        """Ends what it started."""


@dataclass(slots=True)
class Result:
    """Seconds of a round, by side, one for each turn."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, side: str) -> float:
        """Seconds of a round."""
        return statistics.median(self.seconds[side])

    def ratio(self, over: str, side: str = "headgate") -> float | None:
        """Returns how many times faster `side` is than `over`, as the median of the turns; None if one of them did not play."""
        if over not in self.seconds or side not in self.seconds:
            return None
        pairs = zip(self.seconds[over], self.seconds[side], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def take_turns(sides: Mapping[str, Callable[[], Side]], rounds: int, turns: int) -> Result:
    """Makes all sides, plays one turn that does not count and `turns` that do. Raises ValueError if they differ in what came."""
    result, made = Result({name: [] for name in sides}), {}
    try:
        for name, make in sides.items():
            made[name] = make()
        for turn in range(turns + 1):
            told: dict[str, Any] = {}
            for name in _rotated(list(made), turn):
                gc.collect()
                started = time.perf_counter()
                told[name] = made[name].play(rounds)
                if turn:
                    result.seconds[name].append((time.perf_counter() - started) / rounds)
            _same(told)
    finally:
        for side in made.values():
            side.close()
    return result


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    cut = turn % len(names)
    return [*names[cut:], *names[:cut]]


def _same(told: Mapping[str, Any]) -> None:
    first, *others = told
    for other in others:
        if told[other] != told[first]:
            raise ValueError(f"{first} and {other} differ: {told[first]!r}, {told[other]!r}")


class Headgate:
    """A sealed program on the wall clock, recorded; `hub` has a physical action `go` (rounds) and sets `done` after the last.

    With `workers`, the `parallel` reactions of a level run in several threads.
    """

    def __init__(
        self, program: Program, hub: Any, workers: int = 0, parallel: Collection[Reaction] = ()
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headgate-bench-")
        self._recording = Recording.open(Path(self._folder.name) / "recording.jsonl", {})
        self._runtime = (
            ThreadedRuntime(program, WallClock(), self._recording, workers, parallel)
            if workers
            else Runtime(program, WallClock(), self._recording)
        )
        self._hub = hub
        self._told: list[Any] = []
        self._runtime.observe(hub.done, lambda _tag, value: self._told.append(value))
        self._runtime.start()

    def play(self, rounds: int) -> Any:
        self._runtime.inject(self._hub.go, rounds)
        self._runtime.advance()
        return self._told.pop()

    def close(self) -> None:
        if isinstance(self._runtime, ThreadedRuntime):
            self._runtime.close()
        self._recording.close()
        self._folder.cleanup()


class Ring(Program):
    """A hub that tells all actors something by its port `sent`, and gets an answer of each at the next microstep."""

    def __init__(self, name: str, hub: Any, actors: Sequence[Any]) -> None:
        super().__init__(name, [hub, *actors])
        for actor, answer in zip(actors, hub.answers, strict=True):
            self.connect(hub.sent, actor.heard)
            self.connect(actor.answer, answer, after=0)
        self.seal()


class Work(Protocol):
    """The work of a workload's rounds, the same on every side."""

    def begin(self) -> Any:
        """Returns the values that are sent in the next round."""

    def end(self, answers: list[Any], /) -> None:
        """The answers of a round, in the order of the actors."""

    def result(self) -> Any:
        """Returns the results of the rounds."""


class Hub(Reactor):
    """Plays rounds of some work; `sent`, `answered` and `result` are the types of what goes through its ports."""

    def __init__(self, work: Work, actors: int, sent: Any, answered: Any, result: Any) -> None:
        super().__init__("hub")
        self._work = work
        self._holder: type[Large] | None = sent if sent in (Large, Small) else None
        self.go = self.physical("go", int)
        self.sent = self.output("sent", sent)
        self.answers = [self.input(f"answer{index}", answered) for index in range(actors)]
        self.done = self.output("done", result)
        self.left = 0
        self.reaction(self._on_go, on=[self.go], writes=[self.sent])
        self.reaction(self._on_answers, on=self.answers, writes=[self.sent, self.done])

    def opened(self, answer: Any) -> Any:
        """An answer as the work takes it."""
        return opened(answer)

    def _on_go(self, now: Any) -> None:
        self.left = now[self.go]
        self._begin(now)

    def _on_answers(self, now: Any) -> None:
        self._work.end([self.opened(now[port]) for port in self.answers])
        self.left -= 1
        if self.left:
            self._begin(now)
        else:
            now.set(self.done, self._work.result())

    def _begin(self, now: Any) -> None:
        value = self._work.begin()
        now.set(self.sent, self._holder.of(value) if self._holder else value)


def start_ray(object_store_mb: int) -> None:
    """Ray on this machine alone, without its dashboard."""
    import logging

    import ray

    ray.init(
        address="local",  # whatever cluster else runs here
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=object_store_mb * 1024 * 1024,
    )


def stop_ray() -> None:
    """Ends it, if it runs."""
    import ray

    ray.shutdown()
