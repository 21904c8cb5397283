"""The interface between the pool of engines and the placer, which chooses an engine for each call.

The coordinator's placer is the control program (`gateway.control.coordinator_placement`). A follower runs a program of its own by
the coordinator's tables (`gateway.cluster.follower_placement`). Without tables, and when the program has stopped, a process
chooses by the prefix cache and its own slots, whatever `[routing] rule` is (`SlotPlacer`). Either way a call gets no
engine older than its `min_version`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gateway.generation.call import Call
from gateway.generation.slot import Slot
from scheduler.policies.cached import EngineLoad, choose


class PlacementRequest:
    """A call's request for an engine, and the engine once it is found."""

    __slots__ = ("call", "found", "waits")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.found: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self.waits = False
        """True once the pool counts the call among those that wait."""


class Placer(Protocol):
    """Chooses engines for the calls of one pool. Every method returns immediately."""

    def submit(self, request: PlacementRequest) -> None:
        """Request an engine for a call. The placer calls `EnginePool.give`, after `EnginePool.let_wait` if no engine is free."""
        ...

    def cancel(self, request: PlacementRequest) -> None:
        """Withdraw a request for an engine. Do nothing if the call already has one."""
        ...

    def left(self, call: Call) -> None:
        """Report that a call has left its engine, or never reached it."""
        ...

    def changed(self) -> None:
        """Report that slots have changed."""
        ...

    def retire(self) -> list[PlacementRequest]:
        """Stop choosing; return the requests that are still open, for another placer."""
        ...


class WaitingRoom(Protocol):
    """The part of `EnginePool` that `SlotPlacer` needs."""

    slots: dict[str, Slot]

    def cached(self, call: Call) -> tuple[str, int]: ...

    def let_wait(self, request: PlacementRequest) -> bool: ...

    def in_turn(self, wake: Callable[[], bool]) -> None: ...


class SlotPlacer:
    """Chooses by the state of this process alone."""

    def __init__(self, pool: WaitingRoom) -> None:
        self._pool = pool
        self._waiting: dict[PlacementRequest, None] = {}
        """First come, first served."""

    def submit(self, request: PlacementRequest) -> None:
        if slot := self._choose(request.call):
            request.found.set_result(slot)
        elif self._pool.let_wait(request):
            self._waiting[request] = None

    def cancel(self, request: PlacementRequest) -> None:
        self._waiting.pop(request, None)

    def left(self, call: Call) -> None:
        """Do nothing: the slots count their runs."""

    def changed(self) -> None:
        """Let waiting calls retry, a few at a time."""
        for request in self._waiting:
            self._pool.in_turn(partial(self._retry, request))

    def retire(self) -> list[PlacementRequest]:
        requests, self._waiting = list(self._waiting), {}
        return requests

    def _retry(self, request: PlacementRequest) -> bool:
        if request not in self._waiting or (slot := self._choose(request.call)) is None:
            return False
        del self._waiting[request]
        request.found.set_result(slot)
        return True

    def _choose(self, call: Call) -> Slot | None:
        slots, hints = self._pool.slots, call.hints
        legal = [slot for slot in slots.values() if slot.state == "open" and slot.version >= call.min_version]
        if any(slot.name == hints.preferred for slot in legal):
            return slots[hints.preferred]
        cached_in, cached = self._pool.cached(call)
        loads = [EngineLoad(s.name, s.streams, cached if s.name == cached_in else 0) for s in legal]
        name = choose(loads, hints.avoid)
        return slots[name] if name is not None else None
