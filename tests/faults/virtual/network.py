"""An in-memory network between a coordinator and its followers.

A connection keeps the order of its messages, and may delay them; when it is cut, messages under way are lost, and each side
notices at a moment of its own. A follower pings (`heartbeat` of its WebSocket), so it notices a connection that stalls, or that
the other side has lost, within `HEARTBEAT_S`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import aiohttp

HERE: ContextVar[str] = ContextVar("here")
"""The name of the process whose code runs."""
HEARTBEAT_S = 7.5
"""The heartbeat of 5 s, and half of it for the response."""
_LOOK_S = 0.5


class Pipe:
    """One direction."""

    def __init__(self) -> None:
        self.lag_s = 0.0
        self.stalled = False
        self.sent = 0
        self.lost = False
        self._way: deque[tuple[float, str]] = deque()
        self._woken = asyncio.Event()
        self._arrived: asyncio.Queue[str | None] = asyncio.Queue()
        self._carrier = asyncio.get_running_loop().create_task(self._carry())

    def send(self, text: str) -> None:
        """On its way; into nothing, if the connection is cut."""
        self.sent += 1
        if not self.lost:
            self._way.append((asyncio.get_running_loop().time() + self.lag_s, text))
            self.wake()

    def wake(self) -> None:
        """Something has changed."""
        self._woken.set()

    async def receive(self) -> str:
        """Return the next message. Raise ConnectionError once the end was noticed."""
        text = await self._arrived.get()
        if text is None:
            self._arrived.put_nowait(None)
            raise ConnectionError("the other side is gone")
        return text

    def lose(self) -> None:
        """Loses everything that is under way."""
        self.lost = True
        self._way.clear()

    def notice(self) -> None:
        """Report the end of the connection to the receiver."""
        self._carrier.cancel()
        self._arrived.put_nowait(None)

    async def _carry(self) -> None:
        while True:
            while not self._way or self.stalled:
                self._woken.clear()
                await self._woken.wait()
            due, _ = self._way[0]
            if (left := due - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(left)
                continue
            self._arrived.put_nowait(self._way.popleft()[1])


class Connection:
    """Both directions, as each side sees them."""

    def __init__(self, follower: str) -> None:
        self.follower = follower
        self._loop = asyncio.get_running_loop()
        self.up = Pipe()
        """Messages from the follower."""
        self.down = Pipe()
        self.cut_at: float | None = None
        self._bad_since: float | None = None
        self._watch = asyncio.get_running_loop().create_task(self._watched())

    # As `gateway.cluster.hub.Wire`

    async def receive_text(self) -> str:
        return await self.up.receive()

    async def send_text(self, data: str) -> None:
        self.down.send(data)

    # As aiohttp's

    async def send_str(self, data: str) -> None:
        self.up.send(data)

    def __aiter__(self) -> Connection:
        return self

    async def __anext__(self) -> Any:
        try:
            return SimpleNamespace(type=aiohttp.WSMsgType.TEXT, data=await self.down.receive())
        except ConnectionError:
            raise StopAsyncIteration from None

    def stall(self, stalled: bool) -> None:
        """Nothing arrives, either way; nothing is lost."""
        for pipe in (self.up, self.down):
            pipe.stalled = stalled
            pipe.wake()

    def cut(self, follower_after: float, hub_after: float) -> None:
        """Cut the connection."""
        if self.cut_at is None:
            loop = self._loop
            self.cut_at = loop.time()
            self.up.lose()
            self.down.lose()
            loop.call_later(min(follower_after, HEARTBEAT_S), self.down.notice)
            loop.call_later(hub_after, self.up.notice)

    async def _watched(self) -> None:
        """Act as the follower's heartbeat."""
        while self.cut_at is None:
            await asyncio.sleep(_LOOK_S)
            now = asyncio.get_running_loop().time()
            slow = self.up.stalled or self.up.lag_s + self.down.lag_s > HEARTBEAT_S / 3
            self._bad_since = (self._bad_since or now) if slow else None
            if self._bad_since is not None and now - self._bad_since > HEARTBEAT_S - _LOOK_S:
                self.cut(0.0, 0.0)


class Network:
    """Every address that can be reached."""

    def __init__(self) -> None:
        self.hubs: dict[str, Any] = {}
        """Processes by URL, each with a `hub` (None: it refuses links) and a `context`."""
        self.connections: list[Connection] = []
        self.serving: set[asyncio.Task[None]] = set()

    def session(self) -> Any:
        """Stands in for `aiohttp.ClientSession`."""

        @asynccontextmanager
        async def connect(url: str, **_: Any) -> Any:
            process = self.hubs.get(url.removesuffix("/peers/v1/link"))
            if process is None or process.hub is None:
                raise aiohttp.ClientConnectionError(f"no process listens at {url}")
            connection = Connection(HERE.get())
            self.connections.append(connection)
            serving = self._serve(process.hub, connection)
            task = asyncio.get_running_loop().create_task(serving, context=process.context)
            self.serving.add(task)
            task.add_done_callback(self.serving.discard)
            try:
                yield connection
            finally:
                connection.cut(0.0, 0.0)

        class Session:
            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *_: object) -> None:
                return

            def ws_connect(self, url: str, **given: Any) -> AbstractAsyncContextManager[Connection]:
                return connect(url, **given)

        return Session()

    async def _serve(self, hub: Any, connection: Connection) -> None:
        try:
            await hub.serve(connection)
        except ConnectionError:
            return
        finally:
            connection.cut(0.0, 0.0)

    def live(self) -> list[Connection]:
        """Return the open connections."""
        self.connections = [c for c in self.connections if c.cut_at is None]
        return self.connections
