"""Places a follower's calls by the coordinator's tables (`gateway.generation.plan_messages`).

The same reactor as in the coordinator decides on the same snapshot. So a call goes where the coordinator would send it, waits in
the same order and moves for the same reasons, without waiting for the coordinator. Between two tables it counts the calls of this
process, and assumes that the other processes behave the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from gateway.control.program_placer import ProgramPlacer
from gateway.generation.plan_messages import Table
from gateway.generation.pool import EnginePool
from headgate.errors import Unavailable
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import EngineLoad, Snapshot, SpeedFitted
from scheduler.program.following import FollowerProgram
from scheduler.program.placement import PlacementSettings
from scheduler.reactor import Output, PhysicalAction, Runtime, WallClock

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Host:
    """Runs a follower's program, which acts only at events. An error ends it."""

    def __init__(self, program: FollowerProgram) -> None:
        self.running = True
        self.runtime = Runtime(program, WallClock())

    def observe(self, port: Output[T], callback: Callable[[T], None]) -> None:
        self.runtime.observe(port, lambda _tag, value: callback(value))

    def inject(self, action: PhysicalAction[T], value: T, *, now: bool = True) -> None:
        """Inject an event; the decisions about it have been observed when this returns."""
        if not self.running:
            raise Unavailable("the placement of calls has stopped", retry_after=30.0, code="control_stopped")
        try:
            self.runtime.inject_now(action, value)
        except Exception as error:
            self.running = False
            log.critical("the placement of calls has stopped: %s", error, exc_info=error)
            raise Unavailable(
                "the placement of calls has stopped", retry_after=30.0, code="control_stopped"
            ) from error


class FollowerPlacement(ProgramPlacer):
    """The calls of one model, from the first table of a link to the link's end."""

    def __init__(self, model: str, pool: EnginePool, settings: PlacementSettings) -> None:
        program = FollowerProgram(settings)
        host = _Host(program)
        super().__init__(host, program.placement, model, pool)
        self._speeds: dict[str, EngineModel] = {}
        self._begun = False
        host.runtime.start()

    def apply_table(self, table: Table) -> None:
        """Apply the newest table; the first one makes this the placer of the calls."""
        if not self._host.running:
            return
        elsewhere = table.inside()
        try:
            for name, model in table.speeds.items():
                if self._speeds.get(name) != model:
                    self._speeds[name] = model
                    self._host.inject(self.reactor.fitted, SpeedFitted(name, model))
            if not self._begun:
                self.changed()
            self._host.inject(self.reactor.plan, table.plan)
            self._host.inject(self.reactor.peer_load, table.peer_load)
            snapshot = tuple(self._updated(one, elsewhere[one.engine]) for one in table.engines)
            self._host.inject(self.reactor.snapshot, Snapshot(snapshot))
        except Unavailable:
            self._stopped()
            return
        if not self._begun:
            self._begun = True
            self._pool.set_placer(self)

    def _updated(self, shown: EngineLoad, elsewhere: int) -> EngineLoad:
        """Return an engine of the table, with the present number of this process's calls."""
        slot = self._pool.slots.get(shown.engine)
        inside = elsewhere + (slot.streams if slot is not None else 0)
        waiting = min(shown.waiting, inside)
        return EngineLoad(shown.engine, inside - waiting, waiting, shown.kv, shown.tokens_per_s)
