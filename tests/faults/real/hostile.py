"""Conversations that no HTTP library would have, drawn from a seed, over raw sockets."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.faults.real.tags import hidden, tag

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
_PATHS = (
    "/admin/v1/episodes/{tag}",
    "/admin/v1/{tag}",
    "/admin/v1/episodes/{tag}/reward",
    "/e/{tag}/admin/v1/episodes/{tag}",
    "/v1/responses/{tag}",
    "/v1/chat/completions/{tag}",
    "/v1/chat/completions",
    "/v1/responses",
    "/e/{tag}/v1/responses/{tag}",
    "/{tag}",
    "/admin/v1/cluster",
)
_EXTRA = (
    "",
    "Connection: keep-alive\r\n",
    "Connection: content-length\r\n",
    "Connection: close, x-api-key\r\n",
    "Connection: Upgrade\r\nUpgrade: h2c\r\n",
    "Connection: Upgrade\r\nUpgrade: websocket\r\n",
    "TE: trailers, chunked\r\n",
    "Content-Encoding: gzip\r\n",
    "Content-Type: application/json\r\n",
    "X-Headgate-Forwarded: a-guess-of-the-key\r\n",
    "X-Headgate-Not-Begun: 1\r\n",
    "X-Latin: \u00fc\u00ff\r\n",
)
_RESPONSE_S = 1.0
_OWN = {"/adm": ("root", "project"), "/v1/": ("a", "b"), "/e/{": ("root", "a")}
"""Keys that are good for each path, so that some requests are accepted."""
End = Literal["read", "eof", "close", "abort"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The script of one connection: parts, with a wait for a response between them, and its end."""

    owner: str
    parts: tuple[bytes, ...]
    requests: int
    end: End


def conversation(seed: str, owner: str, keys: dict[str, str]) -> Conversation:
    """Draw a conversation from a seed. `keys`: of every kind of caller."""
    rng = random.Random(seed)
    count = rng.choice((1, 1, 1, 2, 3, 6))
    drawing = _Drawing(rng, owner, keys)
    parts: list[bytes] = []
    while drawing.number < count and not drawing.open:
        parts += drawing.request()
    if rng.random() < 0.5:  # in one part
        parts = [b"".join(parts)]
    if rng.random() < 0.3:  # cut anywhere
        at = rng.randrange(1, len(parts[0]))
        parts[:1] = [parts[0][:at], parts[0][at:]]
    end: End = rng.choice(("read", "read", "read", "eof", "close", "abort"))
    return Conversation(owner, tuple(parts), drawing.number, end)


class _Drawing:
    """The requests of one connection."""

    def __init__(self, rng: random.Random, owner: str, keys: dict[str, str]) -> None:
        self.number = 0
        self.open = False
        """The last body is incomplete, so the next bytes would belong to it."""
        self._rng = rng
        self._owner = owner
        self._keys = keys

    def request(self) -> list[bytes]:
        """Return the head and the body of one more request, in parts."""
        rng = self._rng
        name, secret = tag(self._owner, self.number), hidden(self._owner, self.number)
        self.number += 1
        inside = self._plain("GET", f"/admin/v1/episodes/{secret}", self._keys["root"])
        body = rng.choice((b"", inside, inside, inside * 3, inside + b" " * rng.randrange(100_000), b"{}"))
        framing, body = rng.choice(_FRAMINGS)(self, body)
        path = rng.choice(_PATHS)
        good = rng.random() < 0.6
        key = self._keys[rng.choice(_OWN.get(path[:4], ("none",)) if good else sorted(self._keys))]
        header = "Authorization: Bearer {}\r\n" if good or rng.random() < 0.5 else "X-Api-Key: {}\r\n"
        known = header.format(key) if key else ""
        expects = rng.random() < 0.15
        head = (
            f"{rng.choice(METHODS)} {path.format(tag=name)} HTTP/1.{rng.choice('1111110')}\r\n"
            f"Host: 127.0.0.1\r\n{known}{rng.choice(_EXTRA)}{framing}{'Expect: 100-continue' if expects else 'X-Y: z'}\r\n\r\n"
        ).encode("latin-1")
        return [head, body] if expects or rng.random() < 0.2 else [head + body]

    def _plain(self, method: str, path: str, key: str) -> bytes:
        return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n\r\n".encode()

    # How the length of a body is declared

    def length(self, body: bytes) -> tuple[str, bytes]:
        return f"Content-Length: {len(body)}\r\n", body

    def chunked(self, body: bytes) -> tuple[str, bytes]:
        return "Transfer-Encoding: chunked\r\n", self._chunks(body) + b"0\r\n\r\n"

    def trailed(self, body: bytes) -> tuple[str, bytes]:
        return (
            "transfer-encoding: Chunked\r\nTrailer: a\r\n",
            self._chunks(body, b";x=y") + b"0\r\nContent-Length: 9\r\n\r\n",
        )

    def none(self, _: bytes) -> tuple[str, bytes]:
        return "", b""

    def longer(self, body: bytes) -> tuple[str, bytes]:
        """Declare more than is sent."""
        self.open = True
        return f"Content-Length: {len(body) + self._rng.randrange(1, 300)}\r\n", body

    def shorter(self, body: bytes) -> tuple[str, bytes]:
        """Declare less than is sent: the rest is a request of this connection."""
        name = tag(self._owner, self.number)
        self.number += 1
        rest = self._plain(self._rng.choice(METHODS), f"/admin/v1/episodes/{name}", self._keys["root"])
        return f"Content-Length: {len(body)}\r\n", body + rest

    def beyond(self, body: bytes) -> tuple[str, bytes]:
        return f"Content-Length: {2**30}\r\n", body

    def both(self, body: bytes) -> tuple[str, bytes]:
        return f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n" + body

    def twice(self, body: bytes) -> tuple[str, bytes]:
        return f"Content-Length: {len(body)}\r\nContent-Length: 3\r\n", body

    def odd(self, body: bytes) -> tuple[str, bytes]:
        return self._rng.choice(
            ("Content-Length: +9\r\n", "Content-Length : 9\r\n", "Transfer-Encoding: x\r\n")
        ), body

    def broken(self, body: bytes) -> tuple[str, bytes]:
        return "Transfer-Encoding: chunked\r\n", b"5\r\nhe" + body

    def _chunks(self, body: bytes, extension: bytes = b"") -> bytes:
        parts, at = [], 0
        while at < len(body):
            part = body[at : at + self._rng.choice((1, 7, 100, 20_000))]
            parts.append(b"%x%b\r\n%b\r\n" % (len(part), extension, part))
            at += len(part)
        return b"".join(parts[:500]) if len(parts) <= 500 else b"%x\r\n%b\r\n" % (len(body), body)


_FRAMINGS: tuple[Callable[[_Drawing, bytes], tuple[str, bytes]], ...] = (
    *[_Drawing.length] * 6,
    *[_Drawing.chunked] * 3,
    _Drawing.trailed,
    _Drawing.none,
    _Drawing.longer,
    _Drawing.shorter,
    _Drawing.beyond,
    _Drawing.both,
    _Drawing.twice,
    _Drawing.odd,
    _Drawing.broken,
)


async def talk(port: int, script: Conversation) -> bytes:
    """Hold a conversation and return all responses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    try:
        for part in script.parts:
            writer.write(part)
            await writer.drain()
            if part is not script.parts[-1]:
                received += await _within(reader, 0.02)
        if script.end == "eof":
            writer.write_eof()
        if script.end in ("read", "eof"):
            await _responses(reader, script.requests, received)
        elif script.end == "abort":
            at: socket.socket = writer.get_extra_info("socket")
            at.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
    except (OSError, RuntimeError):  # the server has closed it; its earlier responses count
        pass
    finally:
        writer.close()
    return bytes(received)


async def _within(reader: asyncio.StreamReader, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await reader.read(65_536)
    except TimeoutError:
        return b""


async def _responses(reader: asyncio.StreamReader, requests: int, received: bytearray) -> None:
    """Receive until there are as many as requests, nothing arrives in time, or the connection is closed."""
    try:
        async with asyncio.timeout(_RESPONSE_S):
            while received.count(b"HTTP/1.1 ") < requests and (part := await reader.read(65_536)):
                received += part
    except TimeoutError:
        return
    received += await _within(reader, 0.01)
