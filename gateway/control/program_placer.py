"""Connects an engine pool to the placement reactor (`scheduler.program.placement`).

All calls that begin or end within one turn of the event loop are sent together at the end of that turn; ends for which no call
waits are sent with the next calls, or a moment later. A call that was given an engine continues immediately, or when its turn
comes if it had to wait. Owns the open requests, and the slot states that the reactor knows. Invariants:
- no `Arrived` is sent before an earlier `CallDeparted`;
- while a call waits for an engine, an end is sent in the turn in which it happens;
- the reactor counts an engine as open exactly while its slot is open; a call that was sent to an engine that has closed
  requests another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from gateway.generation.call import Call
from gateway.generation.pool import EnginePool
from gateway.generation.slot_placer import PlacementRequest
from headgate.errors import GatewayError, Unavailable
from scheduler.program.calls import Arrived, CallDeparted, Closed, Demand, Move, Opened, Placed
from scheduler.program.placement import Placement
from scheduler.reactor import Output, PhysicalAction

log = logging.getLogger(__name__)

T = TypeVar("T")

_ENDED_S = 0.02
"""The longest that the end of a call for which no other waits is held back."""


class ProgramHost(Protocol):
    """Runs the program that has the reactor."""

    @property
    def running(self) -> bool:
        """True while decisions are made."""
        ...

    def observe(self, port: Output[T], callback: Callable[[T], None]) -> None:
        """Call `callback` with every value of an output, immediately and in order."""
        ...

    def inject(self, action: PhysicalAction[T], value: T, *, now: bool = False) -> None:
        """Inject an event. `now`: the decisions about it have been observed when this returns.

        Raise Unavailable if the program has stopped.
        """
        ...


class ProgramPlacer:
    """The calls of one model in this process. See `gateway.generation.slot_placer.Placer`."""

    def __init__(self, host: ProgramHost, reactor: Placement, model: str, pool: EnginePool) -> None:
        self.reactor = reactor
        self._host = host
        self._model = model
        self._pool = pool
        self._submitted: dict[str, PlacementRequest] = {}
        """Calls that need an engine, since the last turn."""
        self._waiting: dict[str, PlacementRequest] = {}
        """Calls that the program knows and has not placed yet."""
        self._left: list[CallDeparted] = []
        self._scheduled = False
        self._later: asyncio.TimerHandle | None = None
        """Sends the calls that have left, if no other call comes before."""
        self._open: dict[str, tuple[int, int]] = {}
        """The version and generation of each engine that the program knows as open."""
        self._moving: set[asyncio.Task[None]] = set()
        host.observe(reactor.placed, self._on_placed)
        host.observe(reactor.moves, self._on_moves)

    # Events of calls

    def submit(self, request: PlacementRequest) -> None:
        self._submitted[request.call.call_id] = request
        self._schedule_flush()

    def cancel(self, request: PlacementRequest) -> None:
        call = request.call
        if self._submitted.get(call.call_id) is request:
            del self._submitted[call.call_id]
        elif self._waiting.get(call.call_id) is request or request.found.cancelled():
            self._waiting.pop(call.call_id, None)
            self._withdraw(call)

    def _withdraw(self, call: Call) -> None:
        self._left.append(CallDeparted(call.call_id, call.length))
        self._schedule_flush()

    def left(self, call: Call) -> None:
        self._left.append(CallDeparted(call.call_id, call.length))
        if self._waiting:
            self._schedule_flush()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(_ENDED_S, self._flush)

    def retire(self) -> list[PlacementRequest]:
        requests = [*self._waiting.values(), *self._submitted.values()]
        self._waiting, self._submitted = {}, {}
        self._cancel_flush()
        return requests

    def _schedule_flush(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send the program the calls that came and went since the last time."""
        self._scheduled = False
        self._cancel_flush()
        left, self._left = tuple(self._left), []
        submitted, self._submitted = self._submitted, {}
        self._waiting.update(submitted)
        arrived = tuple(self._arrived(request.call) for request in submitted.values())
        try:
            self._host.inject(self.reactor.demand, Demand(left, arrived), now=True)
        except Unavailable:
            self._stopped()
            return
        for name, request in submitted.items():
            if self._waiting.get(name) is request and not self._pool.let_wait(request):
                del self._waiting[name]
                self._withdraw(request.call)

    def _cancel_flush(self) -> None:
        """Cancel the flush that would come later."""
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _stopped(self) -> None:
        """Place calls without the program, which has stopped."""
        log.warning("%s: the control program has stopped; calls go where there is room", self._model)
        self._pool.set_placer(None)

    def _arrived(self, call: Call) -> Arrived:
        cached_in, cached = self._pool.cached(call)
        hints = call.hints
        return Arrived(
            call.call_id,
            call.min_version,
            call.length,
            cached_in=cached_in,
            cached=cached,
            avoid=tuple(sorted(hints.avoid)),
            pinned=bool(call.pinned),
            preferred=hints.preferred,
        )

    # Events of engines

    def changed(self) -> None:
        if not self._host.running:
            return
        try:
            self._sync_slots()
        except Unavailable:
            self._stopped()

    def _sync_slots(self) -> None:
        slots = self._pool.slots
        now = {name: (s.version, s.generation) for name, s in slots.items() if s.state == "open"}
        for name in self._open.keys() - now.keys():
            del self._open[name]
            self._host.inject(self.reactor.closed, Closed(name))
        for name, state in now.items():
            if self._open.get(name) != state:
                self._open[name] = state
                self._host.inject(self.reactor.opened, Opened(name, state[0], slots[name].zone))

    # Decisions

    def _on_placed(self, placed: tuple[Placed, ...]) -> None:
        for one in placed:
            if (request := self._waiting.pop(one.call, None)) is not None:
                self._pool.give(request, one.engine)

    def _on_moves(self, moves: tuple[Move, ...]) -> None:
        for move in moves:
            task = asyncio.create_task(self._move(move), name=f"move-{move.call}")
            self._moving.add(task)
            task.add_done_callback(self._moving.discard)

    async def end_moves(self) -> None:
        """Cancel the moves that have not been made."""
        for task in self._moving:
            task.cancel()
        if self._moving:
            await asyncio.wait(self._moving)

    async def _move(self, move: Move) -> None:
        try:
            await self._pool.move(move.call, move.target or None)
        except GatewayError as error:
            log.info("call %s stays in %s: %s", move.call, move.engine, error)
