"""A recording as a test tells it: at second S something happened, in the words of the control program."""

from __future__ import annotations

import io
from typing import Any

from scheduler.policies.staleness_events import BufferReady, Consume, Leased
from scheduler.program.calls import Arrived, Closed, Demand, Fitted, Left, Opened, Placed
from scheduler.program.events import Do, Done, Ended, Published
from scheduler.program.nodes import Asleep, Claimed, Filling, Hosted, NodeAdded, NodeRemoved, Released, RoleIs
from scheduler.reactor import SECOND, Program, Reactor, Recording, Runtime, VirtualClock
from scheduler.reactor.recording import Run, read

TOLD = {
    "ledger_actor": (Leased, Consume, BufferReady),
    "update_actor": (Do, Done, Ended, Published, Opened, Closed),
    "placement_actor": (Demand, Placed, Fitted),
    "lending": (NodeAdded, NodeRemoved, Hosted, Claimed, Released, Asleep, RoleIs, Filling),
}
SETTINGS: dict[str, Any] = {"models": {"actor": {"ledger": {}}}}


class _Teller(Reactor):
    """Hears everything and decides nothing; what the real program decides comes from outside here."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.actions = {kind: self.physical(kind.__name__.lower(), kind) for kind in TOLD[name]}


class _Kept(io.BytesIO):
    def close(self) -> None:
        """The file is read after it was closed."""


def recorded(*told: tuple[float, Any], until: float) -> list[Run]:
    """The recording of what was told, from second 0 of the world's clock, which is second 1,000 since 1970."""
    tellers = [_Teller(name) for name in TOLD]
    actions = {kind: action for teller in tellers for kind, action in teller.actions.items()}
    program = Program("story", tellers)
    program.seal()
    clock, file = VirtualClock(1000 * SECOND), _Kept()
    recording = Recording(file, SETTINGS)
    runtime = Runtime(program, clock, recording)
    runtime.start()
    for at, value in [*told, (until, Filling("actor", 0, 0, 0, 0))]:
        clock.advance_to(1000 * SECOND + round(at * SECOND))
        runtime.inject(actions[type(value)], value)
        runtime.advance()
    recording.close()
    return read(file.getvalue().decode().splitlines())


def arrives(call: str) -> Demand:
    """A call that waits for its place."""
    return Demand(arrived=(Arrived(call, 0, 10),))


def leaves(call: str) -> Demand:
    """A call that is over."""
    return Demand(left=(Left(call, 20),))
