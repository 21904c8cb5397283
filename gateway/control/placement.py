"""Hosts the placement reactor (`scheduler.program.placement`): sends it calls that need an engine, and applies its choices.

All calls that begin or end within one turn of the event loop are sent together at the end of that turn. A call that was given an
engine continues when its turn comes. Every engine's load is read once a second. Owns the unanswered requests, and the slot states
that the reactor was told. Invariants:
- a call is sent as `Arrived` only after everything before it was sent as `Left`;
- the reactor counts an engine as open exactly while its slot is open; a call that was sent to an engine which closed meanwhile
  requests another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from gateway.control.host import ControlHost
from gateway.control.speed_model import SpeedModels
from gateway.engines.base import Load
from gateway.errors import EngineError, GatewayError, Unavailable
from gateway.rollout.call import Call
from gateway.rollout.peers import Peers
from gateway.rollout.placing import PlacementRequest
from gateway.rollout.pool import EnginePool
from gateway.rollout.slot import Slot
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import (
    Arrived,
    Closed,
    Demand,
    EngineSeen,
    Fitted,
    Left,
    Move,
    Opened,
    Placed,
    Seen,
)

log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""The time that an engine may take to report its state."""


class ControlPlacement:
    """The calls of one model in this process. See `gateway.rollout.placing.Placer`."""

    def __init__(
        self, host: ControlHost, model: str, pool: EnginePool, peers: Peers, prior: EngineModel
    ) -> None:
        """Make it before the host starts."""
        self._host = host
        self._model = model
        self._pool = pool
        self._peers = peers
        self.reactor = host.program.placements[model]
        self.fits = SpeedModels(prior)
        """The fitted speed of the engines."""
        self._asking: dict[str, PlacementRequest] = {}
        """Calls that want an engine, since the last turn."""
        self._waiting: dict[str, PlacementRequest] = {}
        """Calls that the control program knows and has not placed yet."""
        self._left: list[Left] = []
        self._scheduled = False
        self._told: dict[str, tuple[int, int]] = {}
        """The version and generation of each engine that the control program knows as open."""
        self._moving: set[asyncio.Task[None]] = set()
        host.observe(self.reactor.placed, self._on_placed)
        host.observe(self.reactor.moves, self._on_moves)

    def begin(self) -> None:
        """Starts choosing engines for calls."""
        self._pool.set_placer(self)

    async def close(self) -> None:
        """Stops choosing engines; each process chooses by itself again."""
        self._pool.set_placer(None)
        for task in self._moving:
            task.cancel()
        if self._moving:
            await asyncio.wait(self._moving)

    # Events of calls

    def submit(self, request: PlacementRequest) -> None:
        self._asking[request.call.call_id] = request
        self._soon()

    def cancel(self, request: PlacementRequest) -> None:
        call = request.call
        if self._asking.get(call.call_id) is request:
            del self._asking[call.call_id]
        elif self._waiting.get(call.call_id) is request or request.found.cancelled():
            self._waiting.pop(call.call_id, None)
            self.left(call)

    def left(self, call: Call) -> None:
        self._left.append(Left(call.call_id, call.length))
        self._soon()

    def retire(self) -> list[PlacementRequest]:
        requests = [*self._waiting.values(), *self._asking.values()]
        self._waiting, self._asking = {}, {}
        return requests

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        """Sends the control program the events of this turn of the loop."""
        self._scheduled = False
        left, self._left = tuple(self._left), []
        asking, self._asking = self._asking, {}
        self._waiting.update(asking)
        arrived = tuple(self._arrived(request.call) for request in asking.values())
        try:
            self._host.inject(self.reactor.demand, Demand(left, arrived), now=True)
        except Unavailable:
            log.warning("%s: nothing is decided any more; calls go where there is room", self._model)
            self._pool.set_placer(None)
            return
        for name, request in asking.items():
            if self._waiting.get(name) is request and not self._pool.let_wait(request):
                del self._waiting[name]
                self.left(request.call)

    def _arrived(self, call: Call) -> Arrived:
        near, cached = self._pool.cached(call)
        hints = call.hints
        return Arrived(
            call.call_id,
            call.min_version,
            call.length,
            expected=max(hints.expected - len(call.turn.ids), 0),
            tail=hints.tail,
            near=near,
            cached=cached,
            avoid=tuple(sorted(hints.avoid)),
            pinned=bool(call.pinned),
            to=hints.preferred,
        )

    # Events of engines

    def changed(self) -> None:
        if not self._host.running:
            return
        slots = self._pool.slots
        now = {name: (s.version, s.generation) for name, s in slots.items() if s.state == "open"}
        for name in self._told.keys() - now.keys():
            del self._told[name]
            self._host.inject(self.reactor.closed, Closed(name))
        for name, state in now.items():
            if self._told.get(name) != state:
                self._told[name] = state
                self._host.inject(self.reactor.opened, Opened(name, state[0]))

    async def read_loads(self) -> None:
        """Sends the control program the loads of all open engines, and their fitted speeds."""
        slots = [slot for slot in self._pool.slots.values() if slot.state == "open"]
        loads = await asyncio.gather(*(_load(slot) for slot in slots))
        seen = tuple(
            self._engine_load(slot, load)
            for slot, load in zip(slots, loads, strict=True)
            if slot.state == "open"
        )
        self._host.inject(self.reactor.seen, Seen(seen))
        for name, model in self.fits.changed():
            self._host.inject(self.reactor.fitted, Fitted(name, model.k1, model.k2, model.k3, model.k4))
        self.fits.forget(self._pool.slots)

    def _engine_load(self, slot: Slot, load: Load | None) -> EngineSeen:
        """Combines both sides of an engine's load: gateways know best how many requests are inside, the engine which of
        them wait and what they hold."""
        inside = slot.streams + self._peers.count_runs(self._model, slot.name)[0]
        kv = sum(run.call.length for run in slot.runs.values())
        if load is None:
            return EngineSeen(slot.name, inside, 0, kv, 0.0)
        waiting = min(load.waiting, inside)
        now = asyncio.get_running_loop().time()
        rate = self.fits.observe(
            slot.name, slot.generation, now, inside - waiting, max(kv, load.kv), load.sampled
        )
        return EngineSeen(slot.name, inside - waiting, waiting, max(kv, load.kv), rate)

    def describe(self) -> Mapping[str, dict[str, Any]]:
        """The fitted speed of each engine, by name."""
        return self.fits.describe()

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

    async def _move(self, move: Move) -> None:
        try:
            await self._pool.move(move.call, move.to or None)
        except GatewayError as error:
            log.info("call %s stays in %s: %s", move.call, move.engine, error)


async def _load(slot: Slot) -> Load | None:
    """None: the engine does not say."""
    if slot.engine is None:
        return None
    try:
        async with asyncio.timeout(_LOOK_S):
            return await slot.engine.read_load()
    except (EngineError, TimeoutError):
        return None
