"""The coordinator's links to its followers: sends them requests, and records their running calls.

Owns the links. Invariants: a follower receives all changes in the order in which they happened here, beginning with the state of
all engines when it links; a follower that does not reply to a request in time counts as dead, and its link is closed; a dead
follower starts no more runs (`follower.py`), so nothing waits for it. If this process closes the links first, the followers are
not dead: their calls continue, and pending requests never complete.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypedDict

from gateway.cluster.messages import (
    Message,
    Runs,
    SlotMessage,
    counts_from_json,
    episode_to_json,
    error_to_json,
    pack,
    slot_to_json,
    table_to_json,
    unpack,
)
from gateway.cluster.serving import Serving
from gateway.episodes.episodes import Episodes
from gateway.generation.plan_messages import CallCounts, Table, peer_load_of
from gateway.generation.pool import EngineMonitor, EnginePool, NoMonitor
from gateway.generation.slot import Slot
from headgate.errors import GatewayError
from scheduler.program.calls import PeerLoad

log = logging.getLogger(__name__)

_THIS = "this process"
"""In place of a follower's name."""


class Wire(Protocol):
    """A WebSocket."""

    async def receive_text(self) -> str:
        """Return the next message. Raise when the other side has disconnected."""
        ...

    async def send_text(self, data: str) -> None:
        """Send a message."""
        ...


class FollowerDescription(TypedDict):
    """A follower, as the admin API returns it."""

    name: str
    url: str
    episodes: int
    runs: dict[str, Runs]


class _Link:
    """One follower."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.calls: dict[str, CallCounts] = {}
        """Its calls, by model."""
        self.runs: dict[str, Runs] = {}
        """The runs in its engines, by model."""
        self.waiting: dict[str, int] = {}
        self.episodes: set[str] = set()
        """The episodes that may have calls there."""
        self.outbox: asyncio.Queue[Message] = asyncio.Queue()
        self.closed = asyncio.Event()
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[asyncio.Future[None], str, Message]] = {}

    def counts(self, pool: EnginePool) -> CallCounts:
        """Return the follower's calls of a model."""
        return self.calls.get(pool.model, CallCounts())

    def request(self, action: str, values: Message) -> asyncio.Future[None]:
        """Send a request to the follower; the future is done when the follower has acknowledged it or disconnected."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._send(done, action, values)
        return done

    def _send(self, done: asyncio.Future[None], action: str, values: Message) -> None:
        number = next(self._numbers)
        self._pending[number] = done, action, values
        self.outbox.put_nowait({"action": action, "id": number, **values})

    def follow(self, earlier: _Link) -> None:
        """Take over from an earlier link of the same process: repeat the requests that it has not acknowledged."""
        for number, (done, action, values) in list(earlier._pending.items()):
            if action == "end":
                del earlier._pending[number]
                self._send(done, action, values)
        earlier.close()

    def acknowledge(self, number: int) -> None:
        """Mark a request as acknowledged."""
        pending = self._pending.pop(number, None)
        if pending is not None and not pending[0].done():
            pending[0].set_result(None)

    def close(self) -> None:
        """End all pending requests: the follower has disconnected."""
        self.closed.set()
        for number in list(self._pending):
            self.acknowledge(number)


class Hub:
    """Every link of the coordinator; a single process, or a follower, has none. See `gateway.generation.peers.Peers`."""

    def __init__(
        self, pools: Mapping[str, EnginePool], apis: Mapping[str, str], peer_timeout_s: float
    ) -> None:
        """Create the hub. `apis`: the API of each model's engines."""
        self.fence = 0
        """The coordinator's fence, which followers receive."""
        self.coordinates = False
        """True while followers may link: already while the coordinator's parts are opened."""
        self._episodes: asyncio.Future[Episodes] = asyncio.get_running_loop().create_future()
        self._monitor: EngineMonitor = NoMonitor()
        self._pools = pools
        self._apis = apis
        self._peer_timeout_s = peer_timeout_s
        self._links: dict[str, _Link] = {}
        self._serving = Serving()
        self._tables: dict[str, Table] = {}
        """The newest table of each model."""
        self._sharing: dict[str, asyncio.Future[None]] = {}
        """By episode; done once the process that served it exclusively has been informed that it no longer does."""
        self._closing = False

    def coordinate(self, fence: int) -> None:
        """Begin to accept links from followers."""
        self.fence, self.coordinates = fence, True

    def set_monitor(self, monitor: EngineMonitor) -> None:
        """Set what is informed when a follower could not reach an engine, or found something wrong with it."""
        self._monitor = monitor

    def opened(self, episodes: Episodes) -> None:
        """Begin to serve followers' requests for episodes."""
        self._episodes.set_result(episodes)

    # Requests of the control half (`Peers`)

    def send_slot(self, model: str, slot: Slot) -> Awaitable[None]:
        return self._send_to_all("slot", {"slot": self._slot(model, slot)})

    def begin_weight_swap(self, model: str, slot: Slot, version: int) -> Awaitable[None]:
        values = {"model": model, "name": slot.name, "version": version}
        return self._send_to_all("swap", values)

    def give_back(self, model: str, slot: Slot) -> Awaitable[None]:
        return self._send_to_all("give_back", {"model": model, "name": slot.name})

    def remove_engine(self, model: str, name: str) -> Awaitable[None]:
        return self._send_to_all("forget", {"model": model, "name": name})

    def open_episode(self, episode_id: str) -> None:
        self._serving.opened(episode_id)

    async def serves_exclusively(self, episode_id: str) -> bool:
        """Return true if no follower serves an episode that this process serves."""
        return await self._join(episode_id, _THIS)

    def end_episode(self, episode_id: str, reason: GatewayError) -> Awaitable[None]:
        """End an episode's calls in all processes that may have some."""
        self._serving.ended(episode_id)
        links = [link for link in self._links.values() if episode_id in link.episodes]
        for link in links:
            link.episodes.discard(episode_id)
        return self._send_to(links, "end", {"episode": episode_id, **error_to_json(reason)})

    def count_runs(self, model: str, name: str) -> tuple[int, int]:
        found = [link.runs.get(model, {}).get(name, (0, 0)) for link in self._links.values()]
        return sum(streams for streams, _ in found), sum(pinned for _, pinned in found)

    def count_waiting(self, model: str) -> int:
        return sum(link.waiting.get(model, 0) for link in self._links.values())

    def peer_load(self, model: str) -> PeerLoad:
        return peer_load_of([link.counts(self._pools[model]) for link in self._links.values()])

    def send_table(self, model: str, table: Table | None) -> None:
        if table is None:
            self._tables.pop(model, None)
        else:
            self._tables[model] = table
        for link in self._links.values():
            self._send_table(link, model, table)

    def _send_table(self, link: _Link, model: str, table: Table | None) -> None:
        if table is None:
            link.outbox.put_nowait({"table": model, "ended": True})
            return
        pool = self._pools[model]
        peer_load = peer_load_of(
            [pool.counts(), *(one.counts(pool) for one in self._links.values() if one is not link)]
        )
        link.outbox.put_nowait({"table": model, **table_to_json(replace(table, peer_load=peer_load))})

    def describe(self) -> list[FollowerDescription]:
        """Describe every follower for the admin API."""
        return [
            {"name": link.name, "url": link.url, "episodes": len(link.episodes), "runs": link.runs}
            for link in self._links.values()
        ]

    # Messages from followers

    async def serve(self, wire: Wire) -> None:
        """Serve a follower's link."""
        hello = unpack(await wire.receive_text())
        link = _Link(hello["name"], hello["url"])
        self._apply_report(link, hello)
        link.episodes.update(hello["episodes"])
        before, self._links[link.name] = self._links.get(link.name), link
        slots = [self._slot(name, slot) for name, pool in self._pools.items() for slot in pool.slots.values()]
        link.outbox.put_nowait({"welcome": self.fence, "slots": slots})
        for model, table in self._tables.items():
            self._send_table(link, model, table)
        if before is not None:
            link.follow(before)
        log.info("the process %s is linked as a follower", link.name)
        tasks = [
            asyncio.create_task(self._receive_forever(link, wire), name=f"link-{link.name}-receives"),
            asyncio.create_task(self._send_forever(link, wire), name=f"link-{link.name}-sends"),
            asyncio.create_task(link.closed.wait(), name=f"link-{link.name}-closed"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._drop(link)

    def close(self) -> None:
        """Close the links, so that every follower looks for another coordinator. Final: a process coordinates once.

        Pending requests to all followers wait until they are cancelled.
        """
        self.coordinates, self._closing = False, True
        for link in list(self._links.values()):
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        link.close()
        if self._links.get(link.name) is link:
            del self._links[link.name]
            log.warning("the process %s has disconnected", link.name)

    async def _send_forever(self, link: _Link, wire: Wire) -> None:
        while True:
            await wire.send_text(pack(await link.outbox.get()))

    async def _receive_forever(self, link: _Link, wire: Wire) -> None:
        responses: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = unpack(await wire.receive_text())
                if "done" in message:
                    self._apply_report(link, message)
                    link.acknowledge(message["done"])
                elif "request" in message:
                    response = asyncio.create_task(
                        self._respond(link, message), name=f"link-{link.name}-responses"
                    )
                    responses.add(response)
                    response.add_done_callback(responses.discard)
                else:
                    self._apply_report(link, message)
        finally:
            for response in responses:
                response.cancel()

    def _apply_report(self, link: _Link, message: Message) -> None:
        """Apply a report: running calls, failing engines, and episodes with recent calls."""
        link.runs.update(message.get("runs", {}))
        link.waiting.update(message.get("waiting", {}))
        for model, counts in message.get("calls", {}).items():
            link.calls[model] = counts_from_json(counts)
        for model, name, reason in message.get("trouble", ()):
            if slot := self._pools[model].slots.get(name):
                if reason:
                    self._monitor.disputed(model, slot, reason)
                else:
                    self._monitor.unreachable(model, slot)
        for episode_id, ago_s in message.get("used", {}).items():
            if self._episodes.done():
                self._episodes.result().touch(episode_id, ago_s)

    async def _respond(self, link: _Link, message: Message) -> None:
        try:
            episodes = await asyncio.shield(self._episodes)
            if "key_hash" in message:
                live = await episodes.keyed(message["key_hash"])
            else:
                live = await episodes.named(message["episode"])
        except GatewayError as error:
            link.outbox.put_nowait({"response": message["request"], **error_to_json(error)})
            return
        link.episodes.add(live.id)
        exclusive = await self._join(live.id, link.name)
        link.outbox.put_nowait(
            {"response": message["request"], "episode": episode_to_json(live), "exclusive": exclusive}
        )

    async def _join(self, episode_id: str, process: str) -> bool:
        """Return true if a process serves an episode exclusively; otherwise the others have been informed that they do not."""
        exclusive, before = self._serving.join(episode_id, process)
        link = self._links.get(before)
        if link is not None:
            sharing = asyncio.ensure_future(self._send_to([link], "share", {"episode": episode_id}))
            sharing.add_done_callback(lambda _: self._sharing.pop(episode_id))
            self._sharing[episode_id] = sharing
        if underway := self._sharing.get(episode_id):
            await asyncio.shield(underway)
        return exclusive

    def _slot(self, model: str, slot: Slot) -> SlotMessage:
        return slot_to_json(model, slot, self._apis[model])

    def _send_to_all(self, action: str, values: Message) -> Awaitable[None]:
        return self._send_to(list(self._links.values()), action, values, lambda: self._closing)

    def _send_to(
        self,
        links: list[_Link],
        action: str,
        values: Message,
        never: Callable[[], bool] = lambda: False,
    ) -> Awaitable[None]:
        requests = [(link, link.request(action, values)) for link in links]
        return _PendingRequest(requests, action, self._peer_timeout_s, never)


class _PendingRequest:
    """A request to followers. Awaiting it returns once every follower has done it or its link is closed; if `never` returns true,
    it never returns."""

    def __init__(
        self,
        requests: list[tuple[_Link, asyncio.Future[None]]],
        action: str,
        peer_timeout_s: float,
        never: Callable[[], bool],
    ) -> None:
        self._requests = requests
        self._unheard = never
        self._action = action
        self._peer_timeout_s = peer_timeout_s

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> None:
        late: set[asyncio.Future[None]] = set()
        if self._requests:
            _, late = await asyncio.wait({done for _, done in self._requests}, timeout=self._peer_timeout_s)
        if self._unheard():
            await asyncio.get_running_loop().create_future()
        for link, done in self._requests:
            if done in late:
                log.error(
                    "%s did not do %r within %g s ([cluster] peer_timeout_s)",
                    link.name,
                    self._action,
                    self._peer_timeout_s,
                )
                link.close()
