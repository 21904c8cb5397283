"""One gateway process of a cluster that is simulated: the product's own parts, as `gateway.services` puts them together.

Election, membership, link, control half, calls, replies and records are the product's. Only what lies outside is simulated: the
disk (`stores`), the network (`wires`), the engines (`engines`), the tokenizer and the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gateway.api.context import DataPlane, Services
from gateway.api.v1.generation import new_call, new_completion
from gateway.bus.base import Bus
from gateway.cluster.follower import Follower
from gateway.cluster.hub import Hub
from gateway.cluster.membership import Membership
from gateway.cluster.role import Coordinator, CurrentRole
from gateway.config import ClusterMember
from gateway.control.models import Models, ServedModel
from gateway.episodes.open_episode import OpenEpisode
from gateway.episodes.refusals import Refusals
from gateway.episodes.untrained import UntrainedNotice
from gateway.generation.completion import Completion
from gateway.generation.pool import EnginePool
from gateway.generation.replies import Replies
from gateway.generation.reply import Choices, Reader
from gateway.generation.request_key import RequestKey
from gateway.observe.events import EventFeed
from gateway.render.redaction import Redactor
from gateway.render.segmenter import Piece
from gateway.render.tool_alarm import ToolAlarm
from gateway.services import hub_of, open_cluster_member
from gateway.telemetry.base import NoTracing
from gateway.tenancy.limits import Limits
from gateway.trajectories.recorder import Exclusivity, Prompt, Recorder, TurnDetails
from gateway.trajectories.turn import Turn
from headgate.errors import GatewayError
from headgate.types import Sampling
from tests.faults.virtual.engines import Adapter, Server
from tests.faults.virtual.network import HERE
from tests.faults.virtual.stores import HandDatabase

if TYPE_CHECKING:
    from tests.faults.virtual.cluster import Cluster, Opened

MODEL = "m"
PROMPT = 3
"""Tokens of every prompt."""


class ProcessDatabase(HandDatabase):
    """Commits immediately, unless the process is cut off from its store or dead."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.store, cluster.loop)
        self.at_once = True
        self.dead = False
        self._reached = asyncio.Event()
        self._reached.set()

    def cut_off(self, away: bool) -> None:
        """Nothing is read or written until it is reached again; then it is done."""
        self.at_once = not away
        if away:
            self._reached.clear()
        else:
            self._reached.set()
            self.commit()

    def put(self, write: Any) -> asyncio.Future[Any]:
        if self.dead:
            return self._hand_loop.create_future()
        return super().put(write)

    async def read(self, query: Any) -> Any:
        await self._reached.wait()
        if self.dead:
            await asyncio.Event().wait()
        return await super().read(query)

    def commit(self, count: int | None = None) -> None:
        if not self.dead and self._reached.is_set():
            super().commit(count)

    def die(self) -> None:
        self.dead = True
        super().die()


class WatchedRecorder(Recorder):
    """Delay records as the cluster wants, and report them to it."""

    def __init__(self, process: Process, exclusivity: Exclusivity) -> None:
        super().__init__(process.database, cast(Any, None), MODEL, exclusivity)
        self._process = process

    async def record(
        self, episode_id: str, prompt: Prompt, turn: Turn, details: TurnDetails, reply: Any
    ) -> None:
        cluster = self._process.cluster
        if cluster.record_s:
            await asyncio.sleep(cluster.record_s)
        await super().record(episode_id, prompt, turn, details, reply)
        cluster.recorded(self._process, turn, whole=reply is not None)


class PlainSegmenter:
    """Every token is a piece of text. Stands for `Segmenter`, which needs a tokenizer."""

    stopped = False
    matched_stop = ""
    tool_names = frozenset[str]()

    def __init__(self, _prompt: Any) -> None:
        self.consumed = 0

    def push(self, ids: Iterable[int]) -> list[Piece]:
        pieces = [Piece("content", ".") for _ in ids]
        self.consumed += len(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        return []


class Work:
    """A call, from its request on, and what its clients have received of it."""

    def __init__(self, process: Process, episode_id: str, reader: Reader, completion: Completion) -> None:
        self.process = process
        self.episode_id = episode_id
        self.completion = completion
        self.call = completion.call
        self.received: list[int] = []
        """The most tokens that a client has received."""
        self._client = process.spawn(self._read(reader))

    @property
    def recorded(self) -> bool:
        """True once nothing of the call is left to do."""
        task = self.completion._task
        return task is not None and task.done()

    def leave(self) -> None:
        """Disconnect the client."""
        self._client.cancel()

    def come_back(self) -> None:
        """Let a client request the reply again, if it still exists."""
        if self._client.done() and self.completion.joinable and not self.recorded:
            self._client = self.process.spawn(self._read(self.completion.reply.read()))

    async def _read(self, reader: Reader) -> None:
        cluster, got = self.process.cluster, list[int]()
        choices = Choices([reader])
        try:
            async with choices:
                async for news in choices:
                    got += [token for _, delivery in news for token in delivery.ids]
                choices.mark_delivered()
        except GatewayError as error:
            cluster.refused(f"{self.process.name}: {self.call.call_id}", error, self.process, self.episode_id)
        finally:
            common = min(len(got), len(self.received))
            if got[:common] != self.received[:common]:
                detail = f"{self.call.call_id}: two clients received different tokens"
                cluster.report.wrong("wrong_reply", detail)
            self.received = max(got, self.received, key=len)
        if choices.delivered:
            cluster.delivered(self, got)


class Process:
    """One gateway process, from its start to its end."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.url = f"http://{name}"
        self.dead = False
        """True once it was killed, is being stopped, or has ended."""
        self.works: list[Work] = []
        self.context: Context = copy_context()
        self.context.run(HERE.set, name)
        self.database = ProcessDatabase(cluster)
        self.pool = EnginePool(MODEL, cluster.settings.queue)
        self._services: Services | None = None
        """None: the process has just been started."""
        self._stop = asyncio.Event()
        self.task = cluster.spawn(self._live(), self.context)

    def _plane(self, bus: Bus) -> DataPlane:
        settings = self.cluster.settings
        models = Models(settings)
        current_role = CurrentRole()
        recorder = WatchedRecorder(self, current_role)
        given = settings.models[MODEL]
        assert given.path is not None
        models.local[MODEL] = ServedModel(
            MODEL, given.path, given, cast(Any, None), self.pool, recorder, None
        )
        return DataPlane(
            settings=settings,
            database=self.database,
            models=models,
            current_role=current_role,
            replies=Replies(self.database),
            metrics=self.cluster.metrics,
            tool_alarm=ToolAlarm(self.cluster.metrics.tool_faults),
            refusals=Refusals(self.database, self.cluster.metrics.refused_calls),
            redactor=Redactor(),
            untrained=UntrainedNotice(),
            bus=bus,
            hub=hub_of(settings, models),
            events=EventFeed(self.database),
            limits=Limits(settings, models.projects),
            tracing=NoTracing(),
        )

    async def _live(self) -> None:
        """Open the parts in the order of `gateway.services.open_services`."""
        plane = self._plane(self.cluster.bus)
        async with open_cluster_member(plane, ClusterMember(self.url, "key"), self._lost) as self._services:
            await self._stop.wait()
        await plane.replies.close()
        self.database.die()

    def _lost(self, error: BaseException) -> None:
        """Stop the process as the product does when it has lost its place."""
        self.cluster.ended(self, error)
        self.stop()

    def stop(self) -> None:
        """Stop in good order."""
        self.dead = True
        self._stop.set()

    async def die(self) -> None:
        """Act as kill -9: nothing more is recorded or sent, and engines see connections close."""
        self.dead = self.database.dead = True
        for _ in range(20):
            running = self.cluster.running_in(self.name)
            for task in running:
                task.cancel()
            if not running:
                break
            await asyncio.sleep(0)
        self.database.die()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Start a task of this process."""
        return self.cluster.spawn(work, self.context)

    @property
    def services(self) -> Services:
        """The process's parts."""
        assert self._services is not None
        return self._services

    @property
    def hub(self) -> Hub | None:
        """The hub that followers link to."""
        links = None if self.dead or self._services is None else self._services.hub
        return links if links is not None and links.coordinates else None

    @property
    def control(self) -> Coordinator | None:
        """The parts that only the coordinator has."""
        role = None if self.dead or self._services is None else self._services.role
        return role if isinstance(role, Coordinator) else None

    @property
    def follower(self) -> Follower:
        """Return the link to the coordinator."""
        assert isinstance(self.services.role, Follower)
        return self.services.role

    @property
    def fence(self) -> int:
        """The fence under which it coordinates."""
        assert isinstance(self.services.membership, Membership)
        return self.services.membership.fence

    def runs(self) -> int:
        """Return the number of running calls."""
        return sum(not work.recorded for work in self.works)

    async def call(self, episode: Opened, tokens: int, *, pinned: bool) -> None:
        """Call this process with the key of an episode."""
        try:
            callers = self.services.callers
            caller = await callers.identify(episode.key, "")
            assert caller.episode is not None
            live = await callers.still_open(caller.episode, caller.attempt)
        except GatewayError as error:
            self.cluster.refused(f"{self.name}: a call of {episode.id}", error, self, episode.id)
        else:
            await self.begin(live, tokens, pinned=pinned)

    async def begin(self, live: OpenEpisode, tokens: int, *, pinned: bool) -> None:
        """Begin a call of an episode that was just found."""
        cluster = self.cluster
        cluster.calls += 1
        name = f"c{cluster.calls}"
        key = RequestKey.of(live.id, name.encode(), "", 0)
        sampling = Sampling(max_tokens=tokens, seed=1 if pinned else None)
        segment, replies = cast(Any, PlainSegmenter), self.services.replies
        async with replies.claim(key, live.calls, segment) as claim:
            prompt = Prompt(np.zeros(PROMPT, np.int32), None)
            details = TurnDetails("chat", True, {}, sampling, time.time(), request_key=key.stored)
            model = self.services.models.local[MODEL]
            call = new_call(name, model, live, prompt, sampling)
            made = new_completion(self.services, model, call, prompt, details, segment, headers={})
            reader = await replies.start(claim, made)
        self.works.append(Work(self, live.id, reader, made))


class WatchedEngine(Adapter):
    """One process's adapter to an engine. The cluster learns of each request; a dead process sends none."""

    def __init__(self, name: str, process: Process, server: Server) -> None:
        super().__init__(name, server, self._begins)
        self.process = process

    def _begins(self, _server: Server) -> None:
        self.process.cluster.begins(self.process, self.name)

    async def _do(self, work: Any) -> None:
        if self.process.database.dead:
            await asyncio.Event().wait()
        await super()._do(work)

    async def pause(self, *, keep: bool = False) -> None:
        """Note that a coordinator changes an engine: every linked process knows it."""
        self.process.cluster.controlled.add((self.process.fence, self.name))
        await super().pause(keep=keep)

    async def frees_memory(self) -> bool:
        return False

    async def wake(self) -> None:
        """Pause the engine, which is awake already."""
        await self.pause()
