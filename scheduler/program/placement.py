"""Places calls, has engines pull weights, and moves calls: StaleFlow's coordinator, for one model.

Owns the waiting calls and the engine of each running call, from events alone (`calls.py`). This state is speculative: a decision
counts before any engine shows it. The policies decide: `placement`, `sync`, `migration`. Invariants:
- a call is placed on no engine whose version is below its `min_version`;
- while a version is on trial, its engines get the calls whose `min_version` it is, and no others (`open_engines.py`);
- a call that arrived is placed once, unless it leaves first; nothing else is decided about it until it arrives again;
- a call waits only while no open engine has room for it, or for an earlier call that must be trained sooner;
- while a call waits that no open engine may sample, an engine is loading the newest version (order `pull`);
- no call is moved at a tag at which an engine is commanded to pull.

Of several gateway processes the coordinator has one of these reactors, which decides about pulls, and every follower has one for
its own calls (`follower_placement.py`). Followers get the same snapshots and the coordinator's decisions (`Plan`), so their calls
go where the coordinator would send them; calls that wait in other processes count in the order of the queue (`PeerLoad`).

An event costs the logarithm of the number of engines and calls; the snapshot, once a second, costs their number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler.policies.migration import MigrationSettings, Movable, moves
from scheduler.policies.open_engines import Engines
from scheduler.policies.placement import Choice, EngineRequest
from scheduler.policies.sync import SyncSettings, pulls
from scheduler.policies.throughput import EngineModel
from scheduler.policies.waterfall import PeerBacklog, Waterfall
from scheduler.program.calls import (
    Arrived,
    Closed,
    Demand,
    Move,
    Opened,
    PeerLoad,
    Placed,
    Plan,
    Snapshot,
    SpeedFitted,
)
from scheduler.program.events import EngineUnavailable, Started, Target, Verdict
from scheduler.reactor import SECOND, Context, Reactor
from scheduler.reactor.elements import Source

_PULL_S = 5.0
"""An engine that is still open this long after the command to pull receives it again."""


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """The settings of routing, migration and pulls."""

    choice: Choice = field(default_factory=Choice)
    pull: bool = False
    """The weight update's order is `pull`."""
    engine: EngineModel = field(default_factory=EngineModel)
    """The speed model of an engine that has not been fitted yet."""
    sync: SyncSettings = field(default_factory=SyncSettings)
    migration: MigrationSettings = field(default_factory=MigrationSettings)
    zone: str = ""
    """The network zone of this process; empty: all engines are equally near."""
    distance_s: float = 0.0
    """Seconds that a call takes longer in an engine of another zone."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> PlacementSettings:
        """Read the settings from their JSON form: the names of the fields, with a table for each part."""
        parts = {
            "choice": Choice,
            "engine": EngineModel,
            "sync": SyncSettings,
            "migration": MigrationSettings,
        }
        return cls(
            **{name: parts[name](**value) if name in parts else value for name, value in given.items()}
        )


@dataclass(slots=True)
class _Run:
    """A call that was placed."""

    engine: str
    request: EngineRequest
    pinned: bool
    since: float
    """The steps of the engine when the call was placed (`Placement._steps`)."""
    moved: bool = False


class Placement(Reactor):
    """The calls and the open engines of one model."""

    def __init__(self, name: str, settings: PlacementSettings) -> None:
        super().__init__(name)
        self._settings = settings
        self._choice = settings.choice
        self._engines = Engines(self._choice)
        self._waterfall = Waterfall(self._engines)
        self._runs: dict[str, _Run] = {}
        self._inside: dict[str, dict[str, _Run]] = {}
        """The runs of each engine, in the order in which they were placed."""
        self._target = -1
        self._steps: dict[str, float] = {}
        """The number of tokens that each engine has sampled for a call that was there since its first snapshot. The tokens of a
        call in between are the difference to `_Run.since`."""
        self._pulls: dict[str, int] = {}
        """The times (ns) of the commands to pull, by engine, until the engine is open again or dead."""
        self._peer_load: PeerLoad | None = None
        """The load of other processes, once there are any."""
        self._pulls_settled = True
        """In a follower: False if the last plan has new commands to pull."""
        self.started = self.physical("started", Started)
        self.demand = self.physical("demand", Demand)
        self.opened = self.physical("opened", Opened)
        self.closed = self.physical("closed", Closed)
        self.peer_load = self.physical("peer_load", PeerLoad)
        self.plan = self.physical("plan", Plan)
        self.snapshot = self.physical("snapshot", Snapshot)
        self.fitted = self.physical("fitted", SpeedFitted)
        self.target = self.input("target", Target)
        self.unavailable = self.input("unavailable", tuple[EngineUnavailable, ...])
        self.verdict = self.input("verdict", Verdict)
        self.placed = self.output("placed", tuple[Placed, ...])
        self.moves = self.output("moves", tuple[Move, ...])
        self.pull = self.output("pull", tuple[str, ...])
        self.reaction(self._on_started, on=[self.started])
        self.reaction(self._on_unavailable, on=[self.unavailable])
        self.reaction(self._on_target, on=[self.target])
        self.reaction(self._on_verdict, on=[self.verdict])
        self.reaction(self._on_fitted, on=[self.fitted])
        self.reaction(self._on_closed, on=[self.closed])
        self.reaction(self._on_opened, on=[self.opened])
        self.reaction(self._on_demand, on=[self.demand])
        self.reaction(self._on_peer_load, on=[self.peer_load])
        self.reaction(self._on_plan, on=[self.plan])
        self.reaction(self._on_snapshot, on=[self.snapshot])
        every: list[Source[Any]] = [
            *(self.demand, self.opened, self.closed, self.snapshot, self.target, self.unavailable),
        ]
        self.reaction(self._decide, on=every, writes=[self.placed, self.moves, self.pull])

    @property
    def waiting(self) -> int:
        """The number of waiting calls. Only events change it."""
        return len(self._waterfall.waiting)

    def decided(self) -> Plan:
        """Return the plan that followers receive with the snapshot."""
        engines = self._engines
        pulling = tuple(sorted(self._pulls.keys() & engines.open.keys()))
        return Plan(engines.newest, pulling)

    def admitting(self, oldest: int) -> int | None:
        """Return the version of the engine that a new call would get if `oldest` were its `min_version`; None: it would
        wait."""
        engine = self._engines.best(PeerBacklog(oldest, int(self._engines.typical), 1))
        return engine.version if engine is not None else None

    def facts(self) -> Iterator[Opened | SpeedFitted | Demand | Placed]:
        """Yield the open engines and the calls in them, as the events that report them."""
        for name, engine in self._engines.open.items():
            yield Opened(name, engine.version)
            yield SpeedFitted(name, engine.model)
        for call, run in self._runs.items():
            if isinstance(run.request, Arrived):
                yield Demand(arrived=(run.request,))
            yield Placed(call, run.engine)

    # Events

    def _on_started(self, now: Context) -> None:
        self._target = max(self._target, now[self.started].version)
        self._engines.published(self._target)

    def _on_target(self, now: Context) -> None:
        """Let engines pull a version; one on trial is not the newest yet, and one that was returned gets no more calls."""
        target = now[self.target]
        self._engines.candidate = target.version if target.canary is not None else None
        self._pulls.clear()
        if target.canary is not None:
            return
        for name, engine in list(self._engines.open.items()):
            if engine.version > target.version:
                self._engines.closed(name)
        self._target = target.version
        self._engines.published(self._target)

    def _on_verdict(self, now: Context) -> None:
        """Stop treating a bad version as the newest."""
        verdict = now[self.verdict]
        if verdict.kind == "bad" and verdict.version == self._engines.candidate:
            self._engines.candidate = None
        if verdict.kind == "bad" and verdict.version == self._target:
            self._target = verdict.live
            self._engines.withdrawn(verdict.live)
            self._pulls.clear()

    def _on_unavailable(self, now: Context) -> None:
        for unavailable in now[self.unavailable]:
            self._engines.closed(unavailable.engine)
            self._pulls.pop(unavailable.engine, None)

    def _on_fitted(self, now: Context) -> None:
        fitted = now[self.fitted]
        self._engines.fitted(fitted.engine, fitted.model)

    def _on_closed(self, now: Context) -> None:
        self._engines.closed(now[self.closed].engine)

    def _on_opened(self, now: Context) -> None:
        opened = now[self.opened]
        runs = self._inside.get(opened.engine, {}).values()
        kept = [(run.request.version, run.request.length) for run in runs]
        given = self._settings
        far_s = given.distance_s if given.zone and opened.zone != given.zone else 0.0
        self._engines.opened(opened.engine, opened.version, given.engine, kept, far_s)
        if opened.version >= self._target:
            self._pulls.pop(opened.engine, None)

    def _on_demand(self, now: Context) -> None:
        demand = now[self.demand]
        for left in demand.left:
            self._remove(left.call, left.length)
        for arrived in demand.arrived:
            self._remove(arrived.call, arrived.length)
            self._engines.learn(arrived.length)
            self._waterfall.add(arrived)

    def _remove(self, call: str, length: int) -> None:
        run = self._runs.pop(call, None)
        if run is None:
            self._waterfall.drop(call)
        else:
            del self._inside[run.engine][call]
            self._engines.remove_call(run.engine, run.request.version, run.request.length, length)

    def _on_peer_load(self, now: Context) -> None:
        self._peer_load = peer_load = now[self.peer_load]
        self._waterfall.set_peer_backlog(PeerBacklog(q.version, q.length, q.calls) for q in peer_load.queued)

    def _on_plan(self, now: Context) -> None:
        plan = now[self.plan]
        if plan.newest != self._engines.newest:
            self._engines.withdrawn(plan.newest)
        self._pulls_settled = self._pulls.keys() >= set(plan.pulling)
        self._pulls = dict.fromkeys(plan.pulling, now.tag.time)

    def _on_snapshot(self, now: Context) -> None:
        for load in now[self.snapshot].engines:
            self._engines.apply_snapshot(load.engine, load.running, load.waiting, load.kv)
            if load.running:
                steps = self._steps.get(load.engine, 0.0)
                self._steps[load.engine] = steps + load.tokens_per_s / load.running
        if (peer_load := self._peer_load) is not None:
            running = ((one.engine, one.version, one.calls) for one in peer_load.running)
            self._engines.apply_peer_load(peer_load.processes, running)
        self._engines.refile()

    # Decisions

    def _decide(self, now: Context) -> None:
        placed = [self._begin(request, engine) for request, engine in self._waterfall.place()]
        if placed:
            waiting = len(self._waterfall.waiting)
            now.set(self.placed, tuple(placed), why=f"{waiting} wait" if waiting else "")
        if now.present(self.snapshot):
            if not self._pull(now) and self._pulls_settled:
                self._move(now)
        elif now.present(self.target) or not self._can_place_next():
            self._pull(now)

    def _begin(self, request: EngineRequest, engine: str) -> Placed:
        pinned = isinstance(request, Arrived) and request.pinned
        run = self._runs[request.call] = _Run(engine, request, pinned, self._steps.get(engine, 0.0))
        self._inside.setdefault(engine, {})[request.call] = run
        return Placed(request.call, engine)

    def _can_place_next(self) -> bool:
        """Return true if open engines may sample the next call of each `min_version`."""
        return all(self._engines.legal(request.version) for request in self._waterfall.next_calls())

    def _pull(self, now: Context) -> bool:
        """Command engines to pull. Return true if any is commanded."""
        if not self._settings.pull or self._target < 0:
            return False
        late = now.tag.time - int(_PULL_S * SECOND)
        is_open = self._engines.open
        self._pulls = {name: at for name, at in self._pulls.items() if name not in is_open or at > late}
        free = [engine for name, engine in is_open.items() if name not in self._pulls]
        heads = self._waterfall.next_calls()
        named = pulls(
            free,
            len(self._pulls),
            self._target,
            heads,
            self._choice,
            self._settings.sync,
            int(self._engines.typical),
        )
        if named:
            self._pulls.update(dict.fromkeys(named, now.tag.time))
            now.set(self.pull, tuple(named), why=f"to version {self._target}; {len(heads)} queues wait")
        return bool(named)

    def _move(self, now: Context) -> None:
        candidate = self._engines.candidate or sys.maxsize
        engines = [
            engine
            for name, engine in self._engines.open.items()
            if name not in self._pulls and engine.version < candidate
        ]
        planned = moves(engines, self._movable, self._choice, self._settings.migration, self._engines.times)
        for call, _, _ in planned:
            self._runs[call].moved = True
        if planned:
            now.set(self.moves, tuple(Move(*move) for move in planned), why=f"{len(planned)} would gain")

    def _movable(self, engine: str) -> Iterable[Movable]:
        """Yield the calls that may leave an engine. A call that was commanded to move once is leaving already, or cannot move."""
        steps = self._steps.get(engine, 0.0)
        for call, run in self._inside.get(engine, {}).items():
            if not run.pinned and not run.moved:
                version, length = run.request.version, run.request.length + int(steps - run.since)
                yield Movable(call, version, length, self._engines.weight(version))
