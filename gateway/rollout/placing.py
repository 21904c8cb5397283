"""The seam between the pool of engines and who chooses one for a call.

In the coordinator the control program does (`gateway.control.placement`). A process that follows, and one whose control program
has stopped, chooses by the pure policy over its own slots (`SlotPlacer`). A call's V holds in both: no older engine gets it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Protocol

from scheduler.policies.routing import EngineLoad, choose

if TYPE_CHECKING:
    from gateway.rollout.call import Call
    from gateway.rollout.pool import EnginePool
    from gateway.rollout.slot import Slot


class PlacementRequest:
    """A call that looks for an engine, and what it finds."""

    __slots__ = ("call", "found", "waits")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.found: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self.waits = False
        """There was no engine for it at first."""


class Placer(Protocol):
    """Chooses engines for the calls of one pool. Every method returns at once."""

    def submit(self, seeker: PlacementRequest) -> None:
        """A call wants an engine: `EnginePool.give` once there is one, `EnginePool.let_wait` if there is none at first."""
        ...

    def cancel(self, seeker: PlacementRequest) -> None:
        """Withdraws a request for an engine. Nothing changes if the call was given one."""
        ...

    def left(self, call: Call) -> None:
        """A call that was given an engine is in it no more, or never got there."""
        ...

    def changed(self) -> None:
        """Slots have changed."""
        ...

    def retire(self) -> list[PlacementRequest]:
        """Somebody else chooses from now on: for these."""
        ...


class SlotPlacer:
    """Chooses by what this process knows of the engines."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._waiting: dict[PlacementRequest, None] = {}
        """First come, first served."""

    def submit(self, seeker: PlacementRequest) -> None:
        if slot := self._choose(seeker.call):
            seeker.found.set_result(slot)
        elif self._pool.let_wait(seeker):
            self._waiting[seeker] = None

    def cancel(self, seeker: PlacementRequest) -> None:
        self._waiting.pop(seeker, None)

    def left(self, call: Call) -> None:
        """Nothing to do: the slots tell."""

    def changed(self) -> None:
        """Lets waiting calls look for an engine again, a few at a time."""
        for seeker in self._waiting:
            self._pool.in_turn(partial(self._again, seeker))

    def retire(self) -> list[PlacementRequest]:
        seekers, self._waiting = list(self._waiting), {}
        return seekers

    def _again(self, seeker: PlacementRequest) -> bool:
        if seeker not in self._waiting or (slot := self._choose(seeker.call)) is None:
            return False
        del self._waiting[seeker]
        seeker.found.set_result(slot)
        return True

    def _choose(self, call: Call) -> Slot | None:
        slots = self._pool.slots
        legal = [slot for slot in slots.values() if slot.state == "open" and slot.version >= call.version]
        if any(slot.name == call.target for slot in legal):
            return slots[call.target]
        near, cached = self._pool.cached(call)
        loads = [EngineLoad(s.name, s.streams, cached if s.name == near else 0) for s in legal]
        name = choose(loads, frozenset(call.avoid))
        return slots[name] if name is not None else None
