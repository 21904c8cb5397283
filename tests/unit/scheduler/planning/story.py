"""Recordings of the control program that tests write: at second S one event or decision."""

from __future__ import annotations

import io
from typing import Any

from scheduler.policies.staleness_events import BatchReady, Consume, Leased
from scheduler.program.calls import Arrived, CallDeparted, Closed, Demand, Opened, Placed, SpeedFitted
from scheduler.program.events import Published, StepCommand, StepResult, UpdateResult
from scheduler.program.nodes import (
    Asleep,
    Claimed,
    Filling,
    Hosted,
    NodeAdded,
    NodeRemoved,
    Released,
    RoleChange,
)
from scheduler.reactor import SECOND, Program, Reactor, Recording, Runtime, VirtualClock
from scheduler.reactor.reading import Run, read

EVENTS = {
    "ledger_actor": (Leased, Consume, BatchReady),
    "update_actor": (StepCommand, StepResult, UpdateResult, Published, Opened, Closed),
    "placement_actor": (Demand, Placed, SpeedFitted),
    "lending": (NodeAdded, NodeRemoved, Hosted, Claimed, Released, Asleep, RoleChange, Filling),
}
SETTINGS: dict[str, Any] = {"models": {"actor": {"ledger": {}}}}


class _Source(Reactor):
    """A reactor with an action for each event or decision, and without reactions."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.actions = {kind: self.physical(kind.__name__.lower(), kind) for kind in EVENTS[name]}


class _Buffer(io.BytesIO):
    def close(self) -> None:
        """Keep the bytes, which are read after closing."""


def recorded(*events: tuple[float, Any], until: float) -> list[Run]:
    """Return the recording of the events. Second 0 is second 1,000 since 1970."""
    sources = [_Source(name) for name in EVENTS]
    actions = {kind: action for source in sources for kind, action in source.actions.items()}
    program = Program("story", sources)
    program.seal()
    clock, file = VirtualClock(1000 * SECOND), _Buffer()
    recording = Recording(file, SETTINGS)
    runtime = Runtime(program, clock, recording)
    runtime.start()
    for at, value in [*events, (until, Filling("actor", 0, 0, 0, 0))]:
        clock.advance_to(1000 * SECOND + round(at * SECOND))
        runtime.inject(actions[type(value)], value)
        runtime.advance()
    recording.close()
    return read(file.getvalue().decode().splitlines())


def arrives(call: str) -> Demand:
    """Return a call that waits for an engine."""
    return Demand(arrived=(Arrived(call, 0, 10),))


def leaves(call: str) -> Demand:
    """Return the end of a call."""
    return Demand(left=(CallDeparted(call, 20),))
