"""Runs a recording again, and compares what is decided now with what was decided then, bit for bit.

The program is built from the recorded settings and gets the recorded outside events at their tags, in virtual time; everything
else must follow. Where a run goes on from an earlier file, it gets the recorded state first. What a killed run had not yet
written of its last tag is not missed; a run that was closed, or whose file was full, is compared to the end of its record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from scheduler.reactor import codec
from scheduler.reactor.clock import Tag, VirtualClock
from scheduler.reactor.elements import PhysicalAction
from scheduler.reactor.reading import Run, read
from scheduler.reactor.recording import Decision, Entry, Event, Failure, entry_from_json
from scheduler.reactor.runtime import Runtime
from scheduler.reactor.snapshot import restore
from scheduler.reactor.topology import Program

Build = Callable[[dict[str, Any]], Program]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line that is not the same; None where one side has no further line."""

    tag: Tag
    recorded: dict[str, Any] | None
    replayed: dict[str, Any] | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run. `decisions` and `failure` are what was recorded."""

    run: Run
    graph_changed: bool
    difference: Difference | None

    @property
    def events(self) -> int:
        """The number of events from outside."""
        return sum(isinstance(entry, Event) for entry in self.run.entries)

    @property
    def decisions(self) -> list[Decision]:
        """All decisions, in order."""
        return [entry for entry in self.run.entries if isinstance(entry, Decision)]

    @property
    def failure(self) -> Failure | None:
        """The error that ended the run, if a reaction raised."""
        return next((entry for entry in self.run.entries if isinstance(entry, Failure)), None)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """All runs of a recording."""

    runs: tuple[RunReport, ...]

    @property
    def events(self) -> int:
        """The number of events from outside."""
        return sum(run.events for run in self.runs)

    @property
    def decisions(self) -> int:
        """The number of values that were set on outputs."""
        return sum(len(run.decisions) for run in self.runs)

    @property
    def difference(self) -> Difference | None:
        """The first difference of all runs; None if there is none."""
        return next((run.difference for run in self.runs if run.difference is not None), None)

    @property
    def equal(self) -> bool:
        """True if every decision of every run was made again."""
        return self.difference is None

    @property
    def graph_changed(self) -> bool:
        """True if a run was of a program with another topology."""
        return any(run.graph_changed for run in self.runs)


def replay(source: Path | Iterable[str], build: Build) -> ReplayReport:
    """Replay every run of a recording: a file, or its lines. Raise BadRecording, OSError, or what `build` raises."""
    return ReplayReport(tuple(replay_run(run, build) for run in read(source)))


def replay_run(run: Run, build: Build) -> RunReport:
    """Replay one run. Raise BadState, or what `build` raises."""
    program = build(run.header.settings)
    changed = program.digest() != run.header.graph
    memory = _Memory()
    runtime = _Replay(program, run, memory)
    runtime.start()
    if run.header.state is not None:
        runtime.restore(run.header.state)
    difference = runtime.feed()
    if difference is None:
        runtime.run(memory)
        difference = _difference(run, memory.entries)
    return RunReport(run, changed, difference)


class _Memory:
    """A recorder that keeps everything in memory."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def begin(self, program: Program, start: int) -> None:
        """Do nothing: there is no file."""

    def write(self, tag: Tag, lines: Sequence[str]) -> bool:
        """Keep it."""
        self.entries += [entry_from_json(json.loads(line)) for line in lines]
        return True

    def due(self, now: int) -> bool:
        """Return false: memory has no limit."""
        return False

    def go_on(self, program: Program, state: str) -> None:
        """Do nothing: it is never due."""


class _Replay(Runtime):
    """A runtime that gets its outside events from a recording."""

    def __init__(self, program: Program, run: Run, memory: _Memory) -> None:
        self._virtual = VirtualClock(run.header.start)
        super().__init__(program, self._virtual, memory)
        self._run_before = run

    def restore(self, state: str) -> None:
        """Give the program a recorded state. Raise BadState."""
        for tag, source, value in restore(self.program, state):
            self._put(source, value, tag)

    def feed(self) -> Difference | None:
        """Queue the events, each at its tag; return the first that the program does not take."""
        for event in self._run_before.entries:
            if not isinstance(event, Event):
                continue
            action = self.program.elements.get(event.action)
            if not isinstance(action, PhysicalAction):
                return Difference(event.tag, event.to_json(), None, f"no physical action {event.action}")
            try:
                value = codec.from_json(event.value, action.type)
            except TypeError as error:
                return Difference(event.tag, event.to_json(), None, f"{event.action}: {error}")
            self._put(action, value, event.tag)
        return None

    def run(self, memory: _Memory) -> None:
        """Run to the last recorded tag, or to a failure."""
        while self._tags and self._tags[0] <= self._run_before.last:
            self._virtual.advance_to(self._tags[0].time)
            try:
                self.step()
            except Exception:
                if not (memory.entries and isinstance(memory.entries[-1], Failure)):
                    raise
                return


def _difference(run: Run, now: list[Entry]) -> Difference | None:
    recorded, replayed = _results(run.entries), _results(now)
    for then, replayed_result in zip_longest(recorded, replayed):
        if then is None and replayed_result.tag == run.last and not run.ended:
            return None
        before = None if then is None else then.to_json()
        after = None if replayed_result is None else replayed_result.to_json()
        if before != after:
            return Difference(
                min(result.tag for result in (then, replayed_result) if result is not None), before, after
            )
    return None


def _results(entries: Iterable[Entry]) -> list[Decision | Failure]:
    return [entry for entry in entries if isinstance(entry, Decision | Failure)]
