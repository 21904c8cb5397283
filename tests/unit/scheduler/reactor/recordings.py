"""Recorded runs of small reactor programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scheduler.reactor import SECOND, Limit, Recording, Runtime, VirtualClock
from tests.unit.scheduler.reactor.toys import Fleet, Log, Lost, toy

_REACTION = {"on": [0, 1, 2, 3], "writes": [0, 1, 2]}


SPEC: dict[str, Any] = {
    "reactors": [{"inputs": 3, "outputs": 2, "reactions": [_REACTION, _REACTION]}] * 3,
    "links": [[0, 3, None], [1, 6, None], [2, 7, None], [3, 0, 0], [4, 1, 1], [5, 4, 0]],
}


def record(path: Path, settings: dict[str, Any] | None = None, close: bool = True) -> list[str]:
    """Two engines are lost, two seconds apart. Return the lines."""
    program = toy(settings or {})
    recording = Recording.open(path, settings or {})
    runtime = Runtime(program, VirtualClock(1000), recording)
    runtime.start()
    fleet = program.reactors[0]
    assert isinstance(fleet, Fleet)
    runtime.inject(fleet.lost, Lost("e0", -9))
    runtime.run_until(2 * SECOND)
    runtime.inject(fleet.lost, Lost("e1"))
    runtime.advance()
    if close:
        recording.close()
        recording.close()
    return path.read_text().splitlines()


def limited(path: Path, size: int, events: int = 6) -> list[int]:
    """A run whose files are full at a size; returns what was counted in it."""
    program, seen = toy({}), list[int]()
    fleet, log = program.reactors
    assert isinstance(fleet, Fleet)
    assert isinstance(log, Log)
    recording = Recording.open(path, {}, Limit(size))
    runtime = Runtime(program, VirtualClock(), recording)
    runtime.observe(log.count, lambda _, value: seen.append(value))
    runtime.start()
    for number in range(events):
        runtime.inject(fleet.lost, Lost(f"e{number}"))
        runtime.run_until(number * SECOND)
    recording.close()
    assert not recording.ended
    return seen
