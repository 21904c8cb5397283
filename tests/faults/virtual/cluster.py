"""Gateway processes on one virtual loop, and the truth about what they do (`processes` has one of them).

Findings go into `Cluster.report`, because an exception inside a task would look like a fault that the gateway survives. The truth
is known from outside: every token names its version and its place, clients know what they received, and the store is read as it
is committed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gateway.bus.memory import MemoryBus
from gateway.config.settings import Settings
from gateway.control.versions import Versions
from gateway.generation.slot import Slot
from gateway.observe.metrics import Metrics
from gateway.store import ledger as statements
from gateway.store import turns
from gateway.trajectories.turn import Turn
from gateway.updates.weights_check import Weights
from headgate.errors import (
    EngineError,
    Fenced,
    GatewayError,
    Unavailable,
)
from headgate.types import EpisodeRequest
from tests.faults.checker import Report, misplaced
from tests.faults.virtual.clock import Clock, VirtualLoop
from tests.faults.virtual.engines import PLACES, Server, place_of, version_of
from tests.faults.virtual.network import HERE, Network
from tests.faults.virtual.processes import MODEL, PROMPT, Process, WatchedEngine, Work
from tests.faults.virtual.stores import open_store, sqlite_store

LEASE_S, ASK_S = 5.0, 10.0
_LINKED_S = 5.0
"""Virtual seconds in which processes have to find one another at the start."""


@dataclass(frozen=True)
class Opened:
    """An episode, as its driver knows it."""

    id: str
    key: str
    version: int


@dataclass
class Tally:
    """Counts over all runs of a machine."""

    turns: int = 0
    disputed: int = 0
    updates: int = 0
    coordinators: int = 0


@dataclass
class Stored:
    """A turn as it was handed to the store."""

    episode_id: str
    ids: list[int] = field(default_factory=list)
    whole: bool = False


class Cluster:
    """All processes, and what is true."""

    def __init__(
        self, settings: Settings, engines: int, members: int, *, accounts: bool, tally: Tally | None = None
    ) -> None:
        self.settings = settings
        self.tally = tally or Tally()
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        self.report = Report()
        self.controlled: set[tuple[int, str]] = set()
        """Fences and engines: what every linked process knows to be held, until it is opened."""
        self.faults = False
        self.record_s = 0.0
        """Virtual seconds that recording a call takes."""
        self.calls = 0
        self.open: dict[str, Opened] = {}
        """Open episodes, the oldest first."""
        self.min_versions: dict[str, int] = {}
        """The `min_version` of each episode, as its driver knows it."""
        self.over: set[str] = set()
        """Episodes whose end was requested."""
        self.unreported: set[tuple[str, str]] = set()
        """Processes and episodes: the coordinator could not report the end to the process in time."""
        self.turns: dict[str, Stored] = {}
        self.processes: list[Process] = []
        self._running: dict[str, dict[asyncio.Task[Any], None]] = {}
        self._names = 0
        self._keys = 0
        self._fences: set[int] = set()
        self._stack = ExitStack()
        self._stack.enter_context(self._patched())
        self.store = open_store(self._stack.enter_context(sqlite_store()), self.clock)
        self._stack.callback(self.store.dispose)
        self.loop.set_task_factory(self._make_task)
        self.network = Network()
        self.metrics = Metrics()
        self.bus = MemoryBus(settings.bus, shared=True, clock=self.clock.monotonic)
        self.loop.run(self._start(engines, members, accounts=accounts), 1.0)
        self.loop.advance(_LINKED_S)
        assert self.coordinator is not None, "no process coordinates"

    async def _start(self, engines: int, members: int, *, accounts: bool) -> None:
        self.servers = [Server(f"http://e{i}", accounts=accounts) for i in range(engines)]
        for _ in range(members):
            self.add()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        clock, numbers = self.clock, iter(range(1, 1 << 30))

        class Nanoseconds:
            def now(self) -> int:
                return int(clock.now * 1e9)

        async def at_once(work: Any, *given: Any, **named: Any) -> Any:
            return work(*given, **named)

        def weights(path: Path, version: int, *_: object) -> Weights:
            return Weights(version, str(path))

        with (
            patch("time.time", clock.time),
            patch("time.monotonic", clock.monotonic),
            patch("random.uniform", random.Random(0).uniform),
            patch("secrets.token_hex", lambda n=16: f"{next(numbers):0{2 * n}x}"),
            patch("asyncio.to_thread", at_once),
            patch("gateway.services._process_name", HERE.get),
            patch("gateway.cluster.follower.aiohttp.ClientSession", lambda **_: self.network.session()),
            patch("gateway.cluster.engine_mirror.connect", self._connect),
            patch("gateway.updates.engine_steps.connect", self._connect),
            patch("gateway.control.versions.read_weights", weights),
            patch("gateway.control.host.WallClock", Nanoseconds),
            patch("gateway.cluster.follower_placement.WallClock", Nanoseconds),
        ):
            yield

    def _connect(self, name: str, url: str, _api: str, *_: Any, **__: Any) -> WatchedEngine:
        """Return an adapter for the calling process."""
        server = next(server for server in self.servers if server.url == url)
        process = next(process for process in self.processes if process.name == HERE.get())
        return WatchedEngine(name, process, server)

    # Tasks

    def _make_task(self, loop: Any, work: Any, **given: Any) -> asyncio.Task[Any]:
        """Every task belongs to the process in whose context it runs; to none, if it is of the world outside."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **given)
        context = given.get("context")
        name = HERE.get("") if context is None else context.get(HERE, "")
        mine = self._running.setdefault(name, {})
        mine[task] = None
        task.add_done_callback(lambda done: mine.pop(done, None))
        return task

    def running_in(self, name: str) -> list[asyncio.Task[Any]]:
        """Return the running tasks of a process, the oldest first."""
        return list(self._running.get(name, ()))

    def spawn(self, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
        """Start a task whose failure is an error of the test."""
        task = self.loop.create_task(work, context=context or Context())
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report.wrong("failed", f"{task.get_coro()}: {error!r}")

    # Processes

    def add(self) -> Process:
        """Add a process."""
        self._names += 1
        process = Process(self, f"p{self._names}")
        self.processes.append(process)
        self.network.hubs[process.url] = process
        return process

    @property
    def coordinator(self) -> Process | None:
        """The newest coordinator that is ready."""
        ready = [process for process in self.processes if process.control is not None]
        return max(ready, key=lambda process: process.fence, default=None)

    def ended(self, process: Process, error: BaseException) -> None:
        """Check that a process that stops by itself is a superseded coordinator."""
        if not isinstance(error, Fenced) or not self.faults:
            self.report.wrong("failed", f"{process.name} has ended: {error!r}")

    # What drivers and trainers do

    def open_episode(self) -> Opened | None:
        """Open an episode, as a driver. None: it was refused."""
        self._keys += 1
        key, before = f"key-{self._keys}", list(self.open)
        if (coordinator := self.coordinator) is not None:
            coordinator.spawn(self._open(coordinator, key))
            self.loop.settle()
        return next((opened for name, opened in self.open.items() if name not in before), None)

    async def _open(self, coordinator: Process, key: str) -> None:
        assert coordinator.control is not None
        live = self.live_version()
        try:
            request = EpisodeRequest("t", None, 1, "eval", MODEL)
            opened = await coordinator.control.episodes.open(request, 0.0, key)
        except GatewayError as error:
            self.refused("opening an episode", error, coordinator, "")
            return
        if opened.version < live:
            detail = f"{opened.episode_id} has min_version {opened.version}, and {live} was live"
            self.report.wrong("wrong_version", detail)
        self.min_versions[opened.episode_id] = opened.version
        self.open[opened.episode_id] = Opened(opened.episode_id, key, opened.version)

    def end_episode(self, episode_id: str) -> None:
        """End an episode, as a driver."""
        if (coordinator := self.coordinator) is not None:
            del self.open[episode_id]
            self.over.add(episode_id)
            coordinator.spawn(self._end(coordinator, episode_id))

    async def _end(self, coordinator: Process, episode_id: str) -> None:
        assert coordinator.control is not None and coordinator.hub is not None
        links = {name for name, link in coordinator.hub._links.items() if episode_id in link.episodes}
        everywhere = {(process.name, episode_id) for process in self.processes}
        self.unreported |= everywhere  # the coordinator may die before it knows
        try:
            await coordinator.control.episodes.abandon(episode_id, "over")
        except GatewayError as error:
            self.refused(f"the end of {episode_id}", error, coordinator, "")
            return
        hub = coordinator.hub
        reported = {coordinator.name} | {name for name in links if hub is not None and name in hub._links}
        self.unreported -= {(name, episode_id) for name in reported}
        for process in self.processes:
            late = [work for work in process.works if work.episode_id == episode_id and not work.recorded]
            if process.name in reported and late and not process.dead:
                detail = f"{process.name}: {episode_id} has ended, and {late[0].call.call_id} is not recorded"
                self.report.wrong("lost", detail)

    def publish(self) -> None:
        """Publish the version that is not live yet, or the next one."""
        if (coordinator := self.coordinator) is not None:
            coordinator.spawn(self._publish(coordinator))
            self.loop.settle()

    async def _publish(self, coordinator: Process) -> None:
        versions = coordinator.services.coordinator.models.get(MODEL).versions
        assert isinstance(versions, Versions)
        newest = coordinator.database.look(lambda c: statements.newest_version(c, MODEL))
        assert newest is not None
        number = newest["version"] + (newest["state"] == "live")
        try:
            await versions.publish(number, Path(f"/nowhere/{number}"), 0.0)
        except GatewayError as error:
            self.refused(f"publishing {number}", error, coordinator, "")
        else:
            self.tally.updates += 1

    def live_version(self) -> int:
        """Return the newest version that is committed as live."""
        newest = self.processes[-1].database.look(lambda c: statements.newest_version(c, MODEL, "live"))
        return newest["version"] if newest is not None else 0

    # What is true

    def refused(self, what: str, error: GatewayError, process: Process, episode_id: str) -> None:
        """Check a refusal: the episode has ended, or there are faults."""
        if error.code == "episode_closed" and episode_id in self.over:
            return
        if self.faults and isinstance(error, (EngineError, Fenced, Unavailable)):
            return
        self.report.wrong("failed", f"{what}: {error!r}")

    def recorded(self, process: Process, turn: Turn, *, whole: bool) -> None:
        """Check a committed turn."""
        work = next((work for work in process.works if work.call.call_id == turn.call_id), None)
        name, wrong = turn.call_id, self.report.wrong
        if name in self.turns:
            wrong("doubled", f"{name}: recorded twice")
        episode_id = work.episode_id if work is not None else ""
        self.turns[name] = Stored(episode_id, list(turn.ids), whole)
        self.tally.turns += 1
        for _, kind, count, detail in misplaced([place_of(token) for token in turn.ids], PLACES, PROMPT):
            wrong(kind, f"{name}: {detail}", count)
        if sum(span.count for span in turn.spans) != len(turn.ids):
            wrong("wrong_version", f"{name}: {turn.spans} are not {len(turn.ids)} tokens")
        if turn.disputed:
            self.tally.disputed += 1
            if not self.faults:
                wrong("wrong_version", f"{name}: disputed without any fault")
        elif work is not None:
            self._check_versions(turn, work)

    def _check_versions(self, turn: Turn, work: Work) -> None:
        at = 0
        for span in turn.spans:
            truth = [version_of(token) for token in turn.ids[at : at + span.count]]
            if any(not span.version <= version <= span.newest for version in truth):
                self.report.wrong("wrong_version", f"{turn.call_id}: {span} were sampled by {truth}")
            oldest = self.min_versions[work.episode_id]
            if any(version < oldest for version in truth):
                detail = f"{turn.call_id}: its min_version is {oldest}, and it was sampled by {truth}"
                self.report.wrong("wrong_version", detail)
            at += span.count

    def delivered(self, work: Work, got: list[int]) -> None:
        """Check that a client's complete reply is committed, as the client received it."""
        stored = self.turns.get(work.call.call_id)
        if stored is None or not stored.whole or stored.ids != got:
            kind = "wrong_reply" if stored and stored.whole and len(stored.ids) >= len(got) else "lost"
            self.report.wrong(kind, f"{work.call.call_id}: a client received {got}, and {stored} is recorded")

    def begins(self, process: Process, engine: str) -> None:
        """Check a request that is sent to an engine."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.hub is None:
            return
        slot: Slot | None = coordinator.pool.slots.get(engine)
        linked = process is coordinator or process.name in coordinator.hub._links
        if (
            slot is not None
            and slot.state != "open"
            and linked
            and (coordinator.fence, engine) in self.controlled
        ):
            detail = f"{process.name} begins a run in {engine}, which is {slot.state}"
            self.report.wrong("wrong_version", detail)

    def look(self) -> None:
        """Check the findings after every step."""
        if (coordinator := self.coordinator) is not None:
            if coordinator.fence not in self._fences:
                self._fences.add(coordinator.fence)
                self.tally.coordinators += 1
            opened = {
                (coordinator.fence, slot.name)
                for slot in coordinator.pool.slots.values()
                if slot.state == "open"
            }
            self.controlled -= opened
        assert self.report.right, dict(self.report.findings)

    def check_store(self) -> None:
        """Check that the store has every recorded turn, once, and all tokens that clients received."""
        names = sorted({stored.episode_id for stored in self.turns.values() if stored.episode_id})
        nodes = self.processes[-1].database.look(lambda c: turns.nodes(c, MODEL, names))
        kept = [(node.call_id, list(node.ids)) for some in nodes.values() for node in some if node.sampled]
        assert len(dict(kept)) == len(kept), "a call has two turns"
        found = dict(kept)
        for name, stored in self.turns.items():
            assert found.get(name) == stored.ids, name
        for work in (work for process in self.processes if not process.dead for work in process.works):
            if (work.process.name, work.episode_id) in self.unreported and work.call.call_id not in found:
                continue  # the episode was closed, and its calls with it, before this process was notified
            kept_ids = found.get(work.call.call_id, [])
            assert kept_ids[: len(work.received)] == work.received, (
                work.call.call_id,
                work.received,
                kept_ids,
            )

    def close(self) -> None:
        """End everything."""
        for process in self.processes:
            process.database.dead = True
        try:
            self.loop.end()
            for process in self.processes:
                process.database.die()
        finally:
            self._stack.close()
