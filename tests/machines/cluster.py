"""Gateway processes without HTTP and SQL: real pools, calls, hub, follower, steps and control program, on one virtual loop.

What SQL would say (who coordinates, which version is live, which episodes are open) is said by `Cluster`. Whatever is wrong is
put into `Cluster.wrongs`, for an exception inside a task would only look like a fault that the gateway survives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from gateway.control.host import ControlHost, ModelEngines
from gateway.control.live import LiveEpisode, closed
from gateway.errors import EngineError, GatewayError
from gateway.peers.follower import Follower
from gateway.peers.hub import Hub
from gateway.rollout.call import Call
from gateway.rollout.placing import SlotPlacer
from gateway.rollout.pool import EnginePool
from gateway.rollout.slot import Slot
from gateway.rollout.steps import EngineSteps
from gateway.rollout.weights import Weights
from gateway.settings import Settings
from gateway.types import Sampling
from tests.machines.engines import Adapter, Server, place_of, version_of
from tests.machines.virtual import Clock, VirtualLoop
from tests.machines.wires import Network

MODEL = "m"
LEASE_S, ASK_S, WAIT_S = 5.0, 10.0, 1000.0


class Work:
    """A call in an episode, from its start to its record. Stands where a `Completion` would."""

    def __init__(self, process: Process, live: LiveEpisode, tokens: int, *, pinned: bool) -> None:
        self.process = process
        self.live = live
        self.recorded = False
        process.cluster.calls += 1
        sampling = Sampling(max_tokens=tokens, seed=1 if pinned else None)
        prompt = np.zeros(3, np.int32)
        self.call = Call(
            f"c{process.cluster.calls}",
            prompt,
            sampling,
            process.pool,
            episode_id=live.id,
            max_failures=1000,
            version=live.version,
        )
        live.calls.add(self)  # type: ignore[arg-type]
        self.call.start(lambda: None)
        self.task = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        try:
            await self.call.wait()
        except GatewayError as error:
            if not isinstance(error, EngineError) and error.code not in ("episode_closed",):
                self.process.cluster.wrongs.append(f"{self.call.call_id}: {error!r}")
        finally:
            if record_s := self.process.cluster.record_s:
                await asyncio.sleep(record_s)
            if not self.process.dead:
                self.record()
            self.live.calls.discard(self)  # type: ignore[arg-type]

    async def stop(self, reason: GatewayError) -> None:
        """As `Completion.stop`: it is recorded when this returns."""
        await self.call.stop(reason)
        await asyncio.wait({self.task})

    def record(self) -> None:
        """What is told to the store, against the truth."""
        cluster, turn = self.process.cluster, self.call.turn
        self.recorded = True
        wrong = cluster.wrongs.append
        if [place_of(token) for token in turn.ids] != list(range(3, 3 + len(turn.ids))):
            wrong(f"{turn.call_id}: tokens lost or doubled: {turn.ids}")
        if sum(span.count for span in turn.spans) != len(turn.ids):
            wrong(f"{turn.call_id}: {turn.spans} are not {len(turn.ids)} tokens")
        if turn.disputed:
            cluster.disputed += 1
            if not cluster.faults:
                wrong(f"{turn.call_id}: disputed without any fault")
            return
        at = 0
        for span in turn.spans:
            truth = [version_of(token) for token in turn.ids[at : at + span.count]]
            if any(not span.version <= version <= span.newest for version in truth):
                wrong(f"{turn.call_id}: {span} were sampled by {truth}")
            if any(version < self.call.version for version in truth):
                wrong(f"{turn.call_id}: its V is {self.call.version}, and it was sampled by {truth}")
            at += span.count


class Process:
    """One gateway process."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.url = f"http://{name}"
        self.dead = False
        self.works: list[Work] = []
        settings = cluster.settings
        self.pool = EnginePool(MODEL, settings.queue, settings.update.patience_s)
        self.pool.placed_by(_Watched(self))
        self.follower = Follower(name, self.url, name, {MODEL: self.pool}, [])
        self.pool.on_trouble = lambda slot: self.follower.trouble(MODEL, slot)
        self.pool.on_dispute = lambda slot, reason: self.follower.trouble(MODEL, slot, reason)
        self.hub: Hub | None = None
        self.host: ControlHost | None = None
        self.steps: EngineSteps | None = None
        self.live: dict[str, LiveEpisode] = {}
        """Of the coordinator."""
        self._member = cluster.spawn(self._follow())

    async def _follow(self) -> None:
        """As `Membership`, but who coordinates is known."""
        while True:
            url = self.cluster.url
            following = asyncio.create_task(self.follower.follow(url))
            try:
                while not following.done() and self.cluster.url == url:
                    await asyncio.wait({following}, timeout=LEASE_S / 2)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await asyncio.sleep(0.1)

    async def lead(self) -> None:
        """Becomes the coordinator, as `open_control` does it."""
        cluster, settings = self.cluster, self.cluster.settings
        self._member.cancel()
        await asyncio.wait({self._member})
        self.hub = Hub(cluster.fence, {MODEL: self.pool}, {MODEL: "vllm"}, ASK_S)
        cluster.network.hubs[self.url] = self.hub
        engine = settings.engine_of(MODEL)
        self.steps = EngineSteps(self.pool, settings.models[MODEL], engine, settings.update, self.hub)
        model = ModelEngines(self.pool, self.steps, engine)
        self.host = ControlHost(settings, {MODEL: model}, self.hub)
        self.host.start()
        self.hub.on_trouble = self._look_into
        self.live = {name: self.live_of(name) for name in cluster.open}
        self.steps.know(Weights(cluster.live_version, str(cluster.live_version)))
        self.host.begin(MODEL, cluster.live_version)
        known = dict(self.pool.slots)
        for server in cluster.servers:
            self.host.add(MODEL, known.get(server.url) or Slot(server.url, server.url))
        await asyncio.sleep(0.01)
        self.adopt()
        self.hub.opened(self)  # type: ignore[arg-type]
        self._tending = cluster.spawn(self._tend())

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            assert self.host is not None
            await self.host.check_health()

    def adopt(self) -> None:
        """As `Episodes.adopt`."""
        for before in self.follower.retire():
            if live := self.live.get(before.id):
                live.calls = before.calls
                for work in live.calls:
                    work.live = live  # type: ignore[union-attr]
            else:
                for work in before.calls:
                    self.cluster.spawn(work.stop(closed(before.id, "meanwhile")))

    def _look_into(self, model: str, slot: Slot, reason: str) -> None:
        assert self.host is not None
        if reason:
            self.host.lose(model, slot.name, reason)
        else:
            self.host.suspect(model, slot)

    def live_of(self, name: str) -> LiveEpisode:
        """An episode that is open, as the store knows it."""
        return LiveEpisode(name, "t", "g", "eval", MODEL, 0.0, 0.0, version=self.cluster.open[name])

    # As `Episodes`, for the hub

    async def named(self, episode_id: str) -> LiveEpisode:
        """See `Episodes`."""
        if (live := self.live.get(episode_id)) is None:
            raise closed(episode_id, "over")
        return live

    async def keyed(self, key_hash: str) -> LiveEpisode:
        """See `Episodes`."""
        return await self.named(key_hash)

    def seen(self, episode_id: str, ago_s: float) -> None:
        """See `Episodes`."""

    async def call(self, episode_id: str, tokens: int, *, pinned: bool) -> None:
        """Someone calls here."""
        try:
            if self.hub is not None:
                live = await self.named(episode_id)
            else:
                live = await self.follower.keyed(episode_id, WAIT_S)
        except GatewayError:
            return  # the client tries again, or its episode is over
        if not self.dead:
            self.works.append(Work(self, live, tokens, pinned=pinned))

    async def end(self, episode_id: str) -> None:
        """The coordinator ends an episode, as `Endings`."""
        assert self.hub is not None
        live = self.live.pop(episode_id)
        links = {name for name, link in self.hub._links.items() if episode_id in link.episodes}
        elsewhere = self.hub.end(episode_id, closed(episode_id, "over"))
        await asyncio.gather(*(call.stop(closed(episode_id, "over")) for call in list(live.calls)))
        await elsewhere
        for process in self.cluster.processes:
            # Of a process that has gone meanwhile nothing is known.
            mine = process is self or (process.name in links and process.name in self.hub._links)
            late = [work for work in process.works if work.live.id == episode_id and not work.recorded]
            if mine and late and not process.dead:
                said = f"{process.name}: {episode_id} has ended, and {late[0].call.call_id} is not recorded"
                self.cluster.wrongs.append(said)

    def begins(self, server: Server) -> None:
        """A request of this process leaves for an engine."""
        leader = self.cluster.leader
        if leader is None or leader.hub is None:
            return
        slot = leader.pool.slots.get(server.url)
        told = self is leader or self.name in leader.hub._links
        if slot is not None and slot.state != "open" and told and server.url in self.cluster.controlled:
            self.cluster.wrongs.append(f"{self.name} begins a run in {slot.name}, which is {slot.state}")

    def chosen(self, call: Call, slot: Slot) -> bool:
        """An engine was chosen for a call; answers whether it may have it. Who asks the pool again would get it for ever."""
        if slot.version < call.version:
            said = f"{self.name}: {call.call_id} of V = {call.version} was given {slot.name} at version {slot.version}"
            self.cluster.wrongs.append(said)
        return slot.version >= call.version

    def runs(self) -> int:
        """Calls that are not over."""
        return sum(not work.recorded for work in self.works)

    async def die(self) -> None:
        """kill -9: nothing is recorded, and the engine sees its connections close."""
        self.dead = True
        self._member.cancel()
        self.cluster.network.hubs.pop(self.url, None)
        if self.host is not None:
            self._tending.cancel()
            await self.host.close()
        for work in self.works:
            if work.call._task is not None:
                work.call._task.cancel()
            work.task.cancel()
        for task in list(self.follower._ending):
            task.cancel()


class _Watched(SlotPlacer):
    """What a process chooses by itself is looked at before a call has it."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.pool)
        self.process = process

    def _choose(self, call: Call) -> Slot | None:
        slot = super()._choose(call)
        return slot if slot is not None and self.process.chosen(call, slot) else None


class _Told(Adapter):
    """A coordinator that begins to change an engine has told everybody."""

    def __init__(self, process: Process, server: Server) -> None:
        super().__init__(server.url, server, process.begins)
        self.process = process

    async def pause(self, *, keep: bool = False, clear_cache: bool = True) -> None:
        """See `Engine`."""
        self.process.cluster.controlled.add(self.name)
        await super().pause(keep=keep, clear_cache=clear_cache)


class Cluster:
    """All of them, and what the store would know."""

    def __init__(self, settings: Settings, engines: int, members: int, *, accounts: bool) -> None:
        self.settings = settings
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        self.wrongs: list[str] = []
        self.controlled: set[str] = set()
        """Engines of which every linked process knows that they are held, until they are opened."""
        self.disputed = 0
        self.faults = False
        self.record_s = 0.0
        """How long it takes to record a call."""
        self.calls = self.fence = self.published = self.live_version = 0
        self.open: dict[str, int] = {}
        """Episodes that are open, and the V of each."""
        self.url = ""
        self.leader: Process | None = None
        self.processes: list[Process] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self._names = 0
        self._stack = ExitStack()
        self._stack.enter_context(self._patched())
        self.network = Network()
        self.loop.run(self._start(engines, members, accounts=accounts), 1.0)

    async def _start(self, engines: int, members: int, *, accounts: bool) -> None:
        self.servers = [Server(f"e{i}", accounts=accounts) for i in range(engines)]
        for _ in range(members):
            self.add()
        await self.take_place(self.processes[0])

    @contextmanager
    def _patched(self) -> Iterator[None]:
        clock = self.clock

        class Nanoseconds:
            def now(self) -> int:
                return int(clock.now * 1e9)

        with (
            patch("gateway.peers.follower.aiohttp.ClientSession", self._session),
            patch("gateway.peers.follower.connect", self._connect),
            patch("gateway.rollout.steps.connect", self._connect),
            patch("gateway.control.host.WallClock", Nanoseconds),
            patch("gateway.peers.follower.time", clock),
        ):
            yield

    def _session(self, headers: dict[str, str]) -> Any:
        return self.network.session(headers["Authorization"].removeprefix("Bearer "))

    def _connect(self, name: str, url: str, _api: str, *_: Any, **__: Any) -> Adapter:
        """The adapter of whichever process asks: it is found by its pool."""
        server = next(server for server in self.servers if server.url == url)
        return _Told(self._asking(), server)

    def _asking(self) -> Process:
        frame: Any = __import__("sys")._getframe(2)
        owner = frame.f_locals["self"]
        found = [p for p in self.processes if owner is p.follower or owner is p.steps]
        return found[0]

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """A task that is watched."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.wrongs.append(f"{task.get_name()}: {error!r}")

    def add(self) -> Process:
        """One more process."""
        self._names += 1
        self.processes.append(Process(self, f"p{self._names}"))
        return self.processes[-1]

    async def take_place(self, process: Process) -> None:
        """The process has become the coordinator."""
        self.fence += 1
        self.leader, self.url = process, process.url
        self.controlled.clear()
        await process.lead()

    def publish(self) -> None:
        """The trainer publishes what is not live yet, or the next version."""
        assert self.leader is not None and self.leader.host is not None
        if self.published == self.live_version:
            self.published += 1
        number, leader = self.published, self.leader
        leader.steps.know(Weights(number, str(number)))  # type: ignore[union-attr]

        async def update() -> None:
            ended = await leader.host.publish(MODEL, number)  # type: ignore[union-attr]
            if ended.live and not leader.dead:
                self.live_version = max(self.live_version, number)

        self.spawn(update())

    def look(self) -> None:
        """After every step."""
        if self.leader is not None:
            for slot in self.leader.pool.slots.values():
                if slot.state == "open":
                    self.controlled.discard(slot.name)
        assert not self.wrongs, self.wrongs

    def close(self) -> None:
        """Ends everything."""
        for process in self.processes:
            process.dead = True
        self._stack.close()
        self.loop.end()
