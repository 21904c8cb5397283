"""A follower: it mirrors the coordinator's engines and episodes, and runs calls of its own.

Owns the link, and mirrors of the episodes that have called here; `EngineMirror` owns those of the engines. Invariants:
- a run begins only while the link is up and the coordinator reports the engine as open;
- tokens that arrive while the link is down are held. They are accepted if the next welcome reports that the engine's weights did
  not change in the meantime; otherwise they are dropped and the call continues elsewhere;
- the coordinator's requests are executed in order, and each is acknowledged once it is done;
- calls are placed by the newest table of this link, and before the first table by the state of this process;
- an episode that the coordinator has ended starts no call here, and its running calls are recorded before the acknowledgment.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any
from weakref import WeakValueDictionary

import aiohttp

from gateway.cluster.callers import RemoteCallers
from gateway.cluster.engine_mirror import EngineMirror
from gateway.cluster.follower_placement import FollowerPlacement
from gateway.cluster.messages import (
    EpisodeMessage,
    Message,
    counts_to_json,
    episode_from_json,
    error_from_json,
    pack,
    runs_to_json,
    table_from_json,
    unpack,
)
from gateway.episodes.open_episode import OpenEpisode
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from gateway.trajectories.recorder import Recorder
from headgate.errors import GatewayError, Unavailable
from scheduler.program.placement import PlacementSettings

log = logging.getLogger(__name__)

LINK = "/peers/v1/link"
_REPORT_S, _SHORT_REPORT_S = 0.5, 0.02
"""The interval of reports to the coordinator, and the shorter one while it waits for an engine's runs to end."""
_NO_LINK = "the gateway process has no coordinator now"


class Follower:
    """One process's link to the current coordinator."""

    def __init__(
        self,
        name: str,
        url: str,
        key: str,
        pools: Mapping[str, EnginePool],
        recorders: Collection[Recorder],
        wait_s: float,
        placement: PlacementSettings,
    ) -> None:
        """`name` and `url`: of this process. `recorders`: of every model. `wait_s`: how long a call waits for a coordinator.
        `placement`: how the coordinator places calls."""
        self.callers = RemoteCallers(self, wait_s)
        self.episodes: dict[str, OpenEpisode] = {}
        """The episodes that have called here since the link was made, or have calls."""
        self.linked = asyncio.Event()
        self.followed = False
        """True once this process has been linked."""
        self._retired = False
        self._name = name
        self._url = url
        self._key = key
        self._pools = pools
        self._engines = EngineMirror(pools)
        self._recorders = recorders
        self._placement = placement
        self._placements: dict[str, FollowerPlacement] = {}
        """The placement of each model's calls over this link, from the model's first table on."""
        self._by_key: dict[str, OpenEpisode] = {}
        self._known: WeakValueDictionary[str, OpenEpisode] = WeakValueDictionary()
        """All known episodes, including those that only a waiting request holds. One episode is one object, with all its calls.
        """
        self._exclusive: set[str] = set()
        """Episodes that no other process serves, as the coordinator reports."""
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[OpenEpisode]] = {}
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._trouble: list[tuple[str, str, str]] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping: dict[str, asyncio.Event] = {}
        """Episodes whose calls are being stopped."""

    async def follow(self, url: str) -> None:
        """Link to the coordinator at `url`, and return when the link is lost."""
        headers = {"Authorization": f"Bearer {self._key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            try:
                async with session.ws_connect(f"{url}{LINK}", heartbeat=5.0, max_msg_size=0) as wire:
                    await self._exchange_messages(wire)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log.info("no link to the coordinator at %s: %s", url, error)
            finally:
                self._unlink()

    async def keyed(self, key_hash: str, wait_s: float) -> OpenEpisode:
        """Return the open episode of a key. Raise the coordinator's error, or Unavailable without a coordinator for `wait_s`."""
        if (live := self._by_key.get(key_hash)) and self.linked.is_set():
            live.touch()
            return live
        live = await self._request_episode({"key_hash": key_hash}, wait_s)
        live.set_key(key_hash)
        self._by_key[key_hash] = live
        return live

    async def named(self, episode_id: str, wait_s: float) -> OpenEpisode:
        """Return an open episode by its id; raise as `keyed` does."""
        if (live := self.episodes.get(episode_id)) and self.linked.is_set():
            live.touch()
            return live
        return await self._request_episode({"episode": episode_id}, wait_s)

    async def serves_exclusively(self, episode_id: str) -> bool:
        """Return true if no other process serves an episode that this one serves."""
        return episode_id in self._exclusive

    def retire(self) -> list[OpenEpisode]:
        """End following, because this process is the coordinator now; return the episodes that are known here.

        The engines are not changed: the coordinator's parts own them now, and they may be open already.
        """
        self._retired = True
        self._exclusive.clear()
        self.linked.set()  # so that waiting requests get the error
        known, self.episodes = list(self._known.values()), {}  # in this order: `_known` has weak references
        return known

    def unreachable(self, model: str, slot: Slot) -> None:
        """Report to the coordinator that an engine cannot be reached."""
        self._trouble.append((model, slot.name, ""))

    def disputed(self, model: str, slot: Slot, reason: str) -> None:
        """Report to the coordinator that something is wrong with an engine."""
        self._trouble.append((model, slot.name, reason))

    async def _request_episode(self, values: Message, wait_s: float) -> OpenEpisode:
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    await self.linked.wait()
                    if self._retired:
                        message = "this process has become the coordinator"
                        raise Unavailable(message, retry_after=0.1, code="no_coordinator")
                    number = next(self._numbers)
                    response: asyncio.Future[OpenEpisode] = asyncio.get_running_loop().create_future()
                    self._pending[number] = response
                    self._outbox.put_nowait({"request": number, **values})
                    try:
                        return await response
                    except _LinkLost:
                        continue
                    finally:
                        self._pending.pop(number, None)
        except TimeoutError as error:
            message = f"step 'query the coordinator' took more than {wait_s:g} s: {_NO_LINK}"
            raise Unavailable(message, retry_after=2.0, code="no_coordinator") from error

    # Link

    async def _exchange_messages(self, wire: aiohttp.ClientWebSocketResponse) -> None:
        self._outbox = asyncio.Queue()
        hello = {"hello": True, "name": self._name, "url": self._url, "episodes": list(self.episodes)}
        await wire.send_str(pack({**hello, **self._report()}))
        sender = asyncio.create_task(self._send_forever(wire), name="link-sender")
        reporter = asyncio.create_task(self._report_forever(), name="link-reporter")
        try:
            async for message in wire:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                self._on_message(unpack(message.data))
                if sender.done() or reporter.done():
                    break
        finally:
            for task in (sender, reporter):
                task.cancel()
            await asyncio.gather(sender, reporter, return_exceptions=True)

    async def _send_forever(self, wire: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await wire.send_str(pack(await self._outbox.get()))

    async def _report_forever(self) -> None:
        while True:
            soon = self._trouble or self._engines.runs_are_awaited()
            await asyncio.sleep(_SHORT_REPORT_S if soon else _REPORT_S)
            self._outbox.put_nowait(self._report())

    def _report(self) -> Message:
        now = time.monotonic()
        trouble, self._trouble = self._trouble, []
        recent = {
            live.id: 0.0 if live.calls else round(now - live.last_used_at, 3)
            for live in self.episodes.values()
            if live.calls or now - live.last_used_at < 2 * _REPORT_S
        }
        return {
            "runs": {name: runs_to_json(pool) for name, pool in self._pools.items()},
            "waiting": {name: pool.waiting for name, pool in self._pools.items()},
            "calls": {name: counts_to_json(pool.counts()) for name, pool in self._pools.items()},
            "used": recent,
            "trouble": trouble,
        }

    def _unlink(self) -> None:
        """Hold engines and output, and drop episodes without calls, until the next link reports what is allowed."""
        self.linked.clear()
        self._exclusive.clear()
        self._engines.hold(_NO_LINK)
        self._by_key.clear()
        idle = [live.id for live in self.episodes.values() if not live.calls]
        for episode_id in idle:  # the coordinator will not report their end
            self._drop(episode_id)
        for response in self._pending.values():
            if not response.done():
                response.set_exception(_LinkLost())
        self._pending.clear()

    # Messages from the coordinator

    def _on_message(self, message: Message) -> None:
        if "welcome" in message:
            self._on_welcome(message)
        elif "response" in message:
            self._on_response(message)
        elif "table" in message:
            self._on_table(message)
        elif message["action"] == "share":
            self._exclusive.discard(message["episode"])
            self._acknowledge(message, self._outbox)
        elif message["action"] == "end":
            self._run_in_background(self._end_episode(message, self._outbox), f"end-{message['episode']}")
        elif message["action"] == "give_back":
            self._run_in_background(self._give_back(message, self._outbox), f"give-back-{message['name']}")
        else:
            self._engines.on_message(message)
            self._acknowledge(message, self._outbox)

    def _run_in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Execute a request that takes long, without blocking the link."""
        task = asyncio.create_task(work, name=name)
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %s", task.get_name(), error, exc_info=error)

    def _on_welcome(self, message: Message) -> None:
        for name in self._pools:
            self._place_locally(name)  # the last table may be of another coordinator
        self.followed = True
        self.linked.set()
        self._engines.apply_all(message["slots"])
        for live in list(self.episodes.values()):
            self._run_in_background(self._verify(live), f"verify-{live.id}")

    def _on_table(self, message: Message) -> None:
        """Place a model's calls by the coordinator's table."""
        name = message["table"]
        if message.get("ended"):
            self._place_locally(name)
            return
        placement = self._placements.get(name)
        if placement is None:
            placement = self._placements[name] = FollowerPlacement(name, self._pools[name], self._placement)
        placement.apply_table(table_from_json(message))

    def _place_locally(self, name: str) -> None:
        """Place a model's calls by the state of this process, until the next table."""
        if self._placements.pop(name, None) is not None:
            self._pools[name].set_placer(None)

    async def _verify(self, live: OpenEpisode) -> None:
        """Query the coordinator about an episode that may have ended while there was no link."""
        try:
            await self._request_episode({"episode": live.id}, 60.0)
        except GatewayError as error:
            if not isinstance(error, Unavailable):
                await self._stop(live.id, error)

    def _on_response(self, message: Message) -> None:
        response = self._pending.get(message["response"])
        if "error" in message:
            if response is not None and not response.done():
                response.set_exception(error_from_json(message))
            return
        values: EpisodeMessage = message["episode"]
        live = self._known.get(values["id"])
        if live is None:
            live = self._known[values["id"]] = episode_from_json(values, time.monotonic())
        live.begin_attempt(values["attempt"])
        self.episodes[live.id] = live
        live.touch()
        if message["exclusive"]:
            self._exclusive.add(live.id)
        if response is not None and not response.done():
            response.set_result(live)

    async def _end_episode(self, message: Message, outbox: asyncio.Queue[Message]) -> None:
        await self._stop(message["episode"], error_from_json(message))
        self._acknowledge(message, outbox)

    async def _stop(self, episode_id: str, reason: GatewayError) -> None:
        """Stop an episode's calls, and wait until they are recorded. A new link may repeat the request in the meantime."""
        if (over := self._stopping.get(episode_id)) is not None:
            await over.wait()
            return
        self._exclusive.discard(episode_id)
        live = self.episodes.pop(episode_id, None)
        if live is None:
            return
        over = self._stopping[episode_id] = asyncio.Event()
        try:
            self._by_key.pop(live.key_hash, None)
            await live.calls.stop(reason)
            self._drop(episode_id)
        finally:
            del self._stopping[episode_id]
            over.set()

    def _drop(self, episode_id: str) -> None:
        """Forget an episode and its token trees, which the store has."""
        self.episodes.pop(episode_id, None)
        for recorder in self._recorders:
            recorder.forget(episode_id)

    async def _give_back(self, message: Message, outbox: asyncio.Queue[Message]) -> None:
        await self._engines.give_back(message)
        self._acknowledge(message, outbox)

    def _acknowledge(self, message: Message, outbox: asyncio.Queue[Message]) -> None:
        """Acknowledge a request, unless its link is closed: a new link gives the same numbers to other requests."""
        if outbox is self._outbox:
            outbox.put_nowait({"done": message["id"], **self._report()})


class _LinkLost(Exception):
    """The link was lost before the response came."""
