"""Places the coordinator's calls by the control program, and has followers place theirs alike.

Every engine's load is read once a second. The program gets it and the other processes' calls; what it knows and has decided then
goes to the followers, as a table (`gateway.generation.plan_messages`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gateway.control.host import ControlHost
from gateway.control.program_placer import ProgramPlacer
from gateway.control.speed_model import SpeedModels
from gateway.engines.base import Load
from gateway.generation.peers import Peers
from gateway.generation.plan_messages import Table
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from headgate.errors import EngineError
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import EngineLoad, PeerLoad, Snapshot, SpeedFitted

_LOOK_S = 2.0
"""The time that an engine may take to report its state."""


class ControlPlacement(ProgramPlacer):
    """The calls of one model in the process that leads."""

    def __init__(
        self, host: ControlHost, model: str, pool: EnginePool, peers: Peers, prior: EngineModel
    ) -> None:
        """Make it before the host starts."""
        super().__init__(host, host.program.placements[model], model, pool)
        self._peers = peers
        self._peer_load = PeerLoad(1)
        self._loads: tuple[EngineLoad, ...] = ()
        """Of open engines, as last read."""
        self.fits = SpeedModels(prior)
        """The fitted speed of the engines."""

    def begin(self) -> None:
        """Start choosing engines for calls."""
        self._pool.set_placer(self)

    async def close(self) -> None:
        """Stop choosing engines; each process chooses by itself from now on."""
        self._pool.set_placer(None)
        await self.end_moves()

    def _stopped(self) -> None:
        super()._stopped()
        self._peers.send_table(self._model, None)

    async def read_loads(self) -> None:
        """Send the control program the loads of all open engines, what other processes have, and fitted speeds; and those
        processes what it knows and has decided."""
        slots = [slot for slot in self._pool.slots.values() if slot.state == "open"]
        loads = await asyncio.gather(*(_load(slot) for slot in slots))
        snapshot = tuple(
            self._engine_load(slot, load)
            for slot, load in zip(slots, loads, strict=True)
            if slot.state == "open"
        )
        self._loads = snapshot
        if not self._host.running:
            self._peers.send_table(self._model, None)
        peer_load, before = self._peers.peer_load(self._model), self._peer_load
        if peer_load.processes > 1 or before.processes > 1:
            self._peer_load = peer_load
            self._host.inject(self.reactor.peer_load, peer_load)
        self._host.inject(self.reactor.snapshot, Snapshot(snapshot), now=True)
        for name, model in self.fits.changed():
            self._host.inject(self.reactor.fitted, SpeedFitted(name, model))
        self.fits.forget(self._pool.slots)
        self._peers.send_table(self._model, Table(snapshot, self.reactor.decided(), self.fits.models()))

    def _engine_load(self, slot: Slot, load: Load | None) -> EngineLoad:
        """Combine both sides of an engine's load: gateways know best how many requests are inside, the engine which of
        them wait and what they hold."""
        inside = slot.streams + self._peers.count_runs(self._model, slot.name)[0]
        kv = sum(run.call.length for run in slot.runs.values())
        if load is None:
            return EngineLoad(slot.name, inside, 0, kv, 0.0)
        waiting = min(load.waiting, inside)
        now = asyncio.get_running_loop().time()
        rate = self.fits.observe(slot.name, slot.generation, now, inside - waiting, max(kv, load.kv), load)
        return EngineLoad(slot.name, inside - waiting, waiting, max(kv, load.kv), rate)

    def load(self) -> tuple[list[tuple[EngineModel, float, float]], int]:
        """Return the speed, the running calls and the cached tokens of each open engine, and the number of calls that wait."""
        models = self.fits.models()
        engines = [
            (models.get(one.engine, self.fits.prior), float(one.running), float(one.kv))
            for one in self._loads
        ]
        waiting = sum(one.waiting for one in self._loads)
        return engines, waiting + self._pool.waiting + self._peers.count_waiting(self._model)

    def describe(self) -> Mapping[str, dict[str, Any]]:
        """Return the fitted speed of each engine, by name."""
        return self.fits.describe()


async def _load(slot: Slot) -> Load | None:
    """None: the engine does not report it."""
    if slot.engine is None:
        return None
    try:
        async with asyncio.timeout(_LOOK_S):
            return await slot.engine.read_load()
    except (EngineError, TimeoutError):
        return None
