"""Hosts a control program in virtual time, as `gateway/control/host.py` does on the wall clock.

Owns the runtime, its clock and the recording. The clock goes where the world's is before anything is told, so timers that were
due come first. What the program wants is queued, since nothing may be told while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from scheduler.policies.rules import StalenessRule
from scheduler.policies.staleness import BufferRow, GroupRow, LedgerSettings
from scheduler.policies.staleness_events import Command, Event
from scheduler.program import ControlProgram
from scheduler.reactor import SECOND, Output, PhysicalAction, Recording, Runtime, VirtualClock

T = TypeVar("T")


class Hosting:
    """A program with one model that is trained."""

    def __init__(self, settings: dict[str, Any], model: str, recording: Path | None = None) -> None:
        """`settings` as `ControlProgram` takes them."""
        self.program = ControlProgram(settings)
        self.wanted: deque[Any] = deque()
        """The commands of the program, in order."""
        self.clock: Callable[[], float] = lambda: 0.0
        """The world's time, in seconds."""
        self._recording = Recording.open(recording, settings) if recording else None
        self._clock = VirtualClock()
        self._runtime = Runtime(self.program, self._clock, self._recording)
        self._ledger = self.program.ledgers[model]
        self._answer: list[Command] | ValueError | None = None
        self._runtime.observe(self._ledger.decided, lambda _tag, told: self._answered(list(told)))
        self._runtime.observe(self._ledger.impossible, lambda _tag, why: self._answered(ValueError(why)))

    def want(self, port: Output[tuple[T, ...]]) -> None:
        """Collects the commands of this output. Before `start` only."""
        self._runtime.observe(port, lambda _tag, told: self.wanted.extend(told))

    def observe(self, port: Output[T], callback: Callable[[T], None]) -> None:
        """Calls `callback`, which tells nothing, with every value of an output. Before `start` only."""
        self._runtime.observe(port, lambda _tag, told: callback(told))

    def start(self) -> StalenessRule:
        """Starts the program, and answers its ledger."""
        self._runtime.start()
        # Nobody sets this rule's figures
        return cast("StalenessRule", _Ledger(self._ledger.rule, self.decide))

    def tell(self, action: PhysicalAction[T], value: T) -> None:
        """Something has happened; what is decided about it is in `wanted` when this returns."""
        self._runtime.run_until(round(self.clock() * SECOND))
        self._runtime.inject(action, value)
        self._runtime.advance()

    def decide(self, event: Event) -> list[Command]:
        """Passes an event to the ledger and returns its commands. Raises ValueError if the event is impossible."""
        self._answer = None
        self.tell(self._ledger.told, event)
        if isinstance(self._answer, ValueError):
            raise self._answer
        assert self._answer is not None
        return self._answer

    def close(self) -> None:
        """Ends the recording."""
        self._runtime.close()
        if self._recording is not None:
            self._recording.close()

    def _answered(self, answer: list[Command] | ValueError) -> None:
        self._answer = answer


class _Ledger:
    """A rule that is read where it is, and changed through the program alone."""

    def __init__(self, rule: StalenessRule, decide: Callable[[Event], list[Command]]) -> None:
        self._rule, self.apply = rule, decide

    @property
    def settings(self) -> LedgerSettings:
        return self._rule.settings

    @property
    def version(self) -> int:
        return self._rule.version

    @property
    def consumed(self) -> int:
        return self._rule.consumed

    def entries(self, buffer: int) -> tuple[str, ...]:
        return self._rule.entries(buffer)

    def complete(self, buffer: int) -> bool:
        return self._rule.complete(buffer)

    def buffers(self) -> list[BufferRow]:
        return self._rule.buffers()

    def groups(self) -> list[GroupRow]:
        return self._rule.groups()

    def free_slots(self) -> int:
        return self._rule.free_slots()

    def to_json(self) -> dict[str, Any]:
        return self._rule.to_json()

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        raise TypeError("its state is the program's")
