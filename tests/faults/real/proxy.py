"""TCP links between processes that can be reset, cut and slowed.

A `Link` listens on a port and passes bytes on to one of its targets, in order, whatever its faults are. Owns its connections.
Each connection begins with the next target and tries the others, so a link with several is a load balancer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

_LOCAL = "127.0.0.1"
_FULL_BYTES = 2**20
"""Bytes that may wait in a slow link, in each direction, before the sender has to wait."""


class Link:
    """One listening port and its targets."""

    def __init__(self, name: str, port: int, targets: Sequence[int], host: str = _LOCAL) -> None:
        """`targets`: ports of 127.0.0.1."""
        self.name = name
        self.host = host
        self.port = port
        self.delay_s = 0.0
        """The delay of every byte."""
        self.connections = 0
        """Since the beginning."""
        self._targets = list(targets)
        self._turn = itertools.count()
        self._open: set[_Side] = set()
        self._refusing = False
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Return the link's URL, for HTTP."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Side(self), self.host, self.port)

    async def stop(self) -> None:
        """Reset every connection and stop listening."""
        self.drop()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def drop(self) -> int:
        """Reset every connection; return their number."""
        clients = [side for side in self._open if side.client]
        for side in list(self._open):
            side.reset()
        return len(clients)

    async def cut(self, seconds: float) -> None:
        """Reset every connection, and for some seconds every new one."""
        self._refusing = True
        self.drop()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._refusing = False

    async def slow(self, seconds: float, delay_s: float) -> None:
        """Delay every byte for some seconds."""
        self.delay_s = delay_s
        try:
            await asyncio.sleep(seconds)
        finally:
            self.delay_s = 0.0

    async def connect(self, client: _Side) -> None:
        """Find a target for a new connection, or reset it."""
        self.connections += 1
        loop, first = asyncio.get_running_loop(), next(self._turn)
        for i in range(len(self._targets)):
            port = self._targets[(first + i) % len(self._targets)]
            if self._refusing:
                break
            with suppress(OSError):
                _, server = await loop.create_connection(lambda: _Side(self, client), _LOCAL, port)
                client.joined(server)
                return
        client.reset()

    def opened(self, side: _Side) -> None:
        """Add a connection."""
        self._open.add(side)

    def lost(self, side: _Side) -> None:
        """Remove a connection."""
        self._open.discard(side)


class _Side(asyncio.Protocol):
    """One end of a connection. What it reads is written to the other end, after the link's delay."""

    def __init__(self, link: Link, client: _Side | None = None) -> None:
        self.client = client is None
        self._link = link
        self._other = client
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[float, bytes | None]] = deque()
        """(due time, bytes; None: the end)"""
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._finding: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._link.opened(self)
        if self.client:
            transport.pause_reading()
            self._finding = asyncio.create_task(self._link.connect(self), name=f"link-{self._link.name}")

    def joined(self, server: _Side) -> None:
        """Connect the other end."""
        self._other = server
        if self._transport is None or self._transport.is_closing():
            server.reset()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._pass(data)

    def eof_received(self) -> bool:
        self._pass(None)
        return True  # the other direction stays open

    def connection_lost(self, error: Exception | None) -> None:
        self._link.lost(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._other is not None:
            # Delayed bytes arrive before the end of the connection, as they would without the link.
            other = self._other
            if error is not None:
                other.reset()
            else:
                while self._waiting:
                    self._write(self._waiting.popleft()[1])
                other.close()

    def pause_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.resume_reading()

    def reset(self) -> None:
        """Reset both ends."""
        self._waiting.clear()
        if self._transport is not None:
            self._transport.abort()
        other, self._other = self._other, None
        if other is not None:
            other.reset()

    def close(self) -> None:
        """Close it once everything is written."""
        if self._transport is not None:
            self._transport.close()

    def _pass(self, data: bytes | None) -> None:
        delay = self._link.delay_s
        if not delay and not self._waiting:
            self._write(data)
            return
        loop = asyncio.get_running_loop()
        self._waiting.append((loop.time() + delay, data))
        self._bytes += len(data or b"")
        if self._bytes > _FULL_BYTES and self._transport is not None:
            self._transport.pause_reading()
        if self._timer is None:
            self._timer = loop.call_at(self._waiting[0][0], self._due)

    def _due(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        now = loop.time() + 0.001
        while self._waiting and self._waiting[0][0] <= now:
            data = self._waiting.popleft()[1]
            self._bytes -= len(data or b"")
            self._write(data)
        if self._waiting:
            self._timer = loop.call_at(self._waiting[0][0], self._due)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _write(self, data: bytes | None) -> None:
        other = self._other
        if other is None or other._transport is None or other._transport.is_closing():
            return
        if data is None:
            with suppress(OSError, NotImplementedError, RuntimeError):
                other._transport.write_eof()
        else:
            other._transport.write(data)
