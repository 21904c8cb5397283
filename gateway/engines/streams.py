"""Connections for streams of events from one engine: HTTP/1.1, a POST at a time, its response's body as it comes.

Every token passes here, so the parser (`httptools`, the one of our own server) calls the connection itself: a client library's
layers cost a short request more than its rendering. Everything else goes through aiohttp (`http.py`). Owns the connections, those
that are idle too. A connection is used again only if its response was read to the end.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import aiohttp
import httptools
from yarl import URL

from headgate.http import KEEP_ALIVE_S

CONNECT_S = 30.0
"""Long enough for busy machines: a dead engine refuses immediately, and health checks notice a silent host."""
READ_BYTES = 2**20
"""Bytes that may wait in a connection before its sender is slowed down: the whole of a long reply fits."""


class StreamConnections:
    """The connections to one engine. A response may be silent for `silence_s`."""

    def __init__(self, base_url: str, silence_s: float) -> None:
        self.silence_s = silence_s
        self._base = URL(base_url)
        self._idle: list[StreamConnection] = []
        self._all: set[StreamConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._heads: dict[str, bytes] = {}

    async def post(self, path: str, body: bytes) -> StreamConnection:
        """Post JSON, and wait for the head of the response. The caller must `leave` the connection.

        Raise OSError or TimeoutError if there is none.
        """
        connection = self._known() or await self._made()
        try:
            await connection.send(b"%b%d\r\n\r\n%b" % (self._head(path), len(body), body))
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close every connection."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.close()

    def lost(self, connection: StreamConnection) -> None:
        """Remove a closed connection."""
        self._all.discard(connection)

    def rest(self, connection: StreamConnection) -> None:
        """Keep a connection for the next request."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        self._sweep = self._sweep or asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._sweep_idle)

    def _known(self) -> StreamConnection | None:
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.open and connection.idle_since > oldest:
                connection.new = False
                return connection
            connection.close()
        return None

    async def _made(self) -> StreamConnection:
        loop, url = asyncio.get_running_loop(), self._base
        made, tls = partial(StreamConnection, self), True if url.scheme == "https" else None
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(made, url.host or "", url.port or 80, ssl=tls)
        self._all.add(connection)
        return connection

    def _sweep_idle(self) -> None:
        """Close what has been idle for too long."""
        oldest, self._sweep = asyncio.get_running_loop().time() - KEEP_ALIVE_S, None
        idle, self._idle = self._idle, []
        for connection in idle:
            if connection.open and connection.idle_since > oldest:
                self._idle.append(connection)
            else:
                connection.close()
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._sweep_idle)

    def _head(self, path: str) -> bytes:
        """Return a request's head up to its body's length."""
        if path not in self._heads:
            url = self._base.joinpath(path.lstrip("/"), encoded=True)
            lines = [f"POST {url.raw_path_qs} HTTP/1.1", f"host: {url.host_port_subcomponent}"]
            if url.user or url.password:
                lines.append(
                    f"authorization: {aiohttp.BasicAuth(url.user or '', url.password or '').encode()}"
                )
            lines += ["accept: */*", "accept-encoding: identity", "user-agent: headgate"]
            lines += ["content-type: application/json", "content-length: "]
            self._heads[path] = "\r\n".join(lines).encode()
        return self._heads[path]


class StreamConnection(asyncio.Protocol):
    """One connection, and the response that comes over it."""

    def __init__(self, pool: StreamConnections) -> None:
        self.new = True
        """True during its first request. A connection does not outlive the server's process."""
        self.status = 0
        """The response's status; 0 until its head is there."""
        self.idle_since = 0.0
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._paused = False
        self._requested = self._whole = self._left = self._lasts = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._received_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """True while the connection can carry a request."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes) -> None:
        """Send a request, and wait for the head of its response."""
        self.status, self._requested, self._whole, self._left = 0, True, False, False
        self._received_at = self._loop.time()
        self._timer = self._loop.call_later(self._pool.silence_s, self._check_silence)
        if self._transport is not None:
            self._transport.write(request)
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Return what has come of the response's body since the last time; wait if that is nothing. Empty at its end."""
        while not self._parts:
            if self._whole:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read_whole(self) -> bytes:
        """Return the rest of the response's body."""
        parts = []
        while data := await self.read():
            parts.append(data)
        return b"".join(parts)

    def leave(self, *, done: bool) -> None:
        """End the request. `done`: the reply is complete, or only its end is missing.

        Otherwise the connection is closed, which stops the engine's work on the request.
        """
        self._left = True
        if self._whole:
            self._end()
        elif not done:
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()
        self.close()

    def _check_silence(self) -> None:
        """Fail a request that is silent for too long. One timer per request: arriving data only stores the time."""
        now = self._loop.time()
        if self._paused:
            self._received_at = now
        if (left := self._received_at + self._pool.silence_s - now) > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
        else:
            self._fail(TimeoutError(f"silent for {self._pool.silence_s:g} s"))

    def _end(self) -> None:
        """End a complete reply that has no reader."""
        self._requested = False
        if self._timer is not None:
            self._timer.cancel()
        if self.open and self._lasts:
            self._parts.clear()
            self._pool.rest(self)
        else:
            self.close()

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        self._fail(exc or ConnectionError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        if not self._requested or self._whole:
            self._fail(ConnectionError("the engine sent more than its response"))
            return
        self._received_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"the engine's response is not HTTP/1.1: {error}"))
            return
        self._wake()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        if self._whole:
            self._fail(ConnectionError("the engine sent a second response"))

    def on_headers_complete(self) -> None:
        if (status := self._parser.get_status_code()) >= 200:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)
        if self._size > READ_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._whole, self._lasts = self.status > 0, self._parser.should_keep_alive()
        if self._whole and self._left:
            self._end()
