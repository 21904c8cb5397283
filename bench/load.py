"""A cheap load client: keep-alive HTTP/1.1 connections that post bytes, time the response, and read it afterwards.

Owns the connections and the clock. It knows no API: a `Target` writes requests and counts tokens of responses, so every target
is driven by the same code. The load is a closed loop: each stream sends its next request when the last one has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import httptools

_REQUEST_S = 120.0
_AFTER_FAILURE_S = 0.05


class RequestFailed(Exception):
    """A request without a whole response."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a load: `streams` requests at a time, each for up to `max_tokens` tokens."""

    streams: int
    max_tokens: int
    streamed: bool


class Target(Protocol):
    """A server under load."""

    name: str
    port: int

    def begins(self, body: bytes, streamed: bool) -> bool:
        """Return whether the body so far has a part of the response in it; the head of a stream names the role alone."""
        ...

    def request(self, stream: int, max_tokens: int, streamed: bool) -> bytes:
        """Return the whole next HTTP request of a stream."""
        ...

    def count(self, events: list[bytes], streamed: bool) -> tuple[int, int]:
        """Return the chunks with a part of the response, and its tokens. Raise RequestFailed if it is not whole."""
        ...


@dataclass(frozen=True, slots=True)
class Response:
    """One whole response; times in seconds since the request was sent."""

    first_s: float
    """The time of the first part of the response."""
    whole_s: float
    chunks: int
    tokens: int
    ended: float
    """The time of its last byte (`time.perf_counter`)."""
    times: list[float]
    """The time of each read that brought events, and the number of events until then; empty for a response in one piece."""
    events: list[int]

    def share(self, began: float, ended: float) -> float:
        """Return the share of the response that came between two moments, from 0 to 1."""
        if not self.events:
            return float(began <= self.ended < ended)
        inside = sum(n for at, n in zip(self.times, self.events, strict=True) if began <= at < ended)
        return inside / sum(self.events)


@dataclass(frozen=True, slots=True)
class Window:
    """Counts between two moments of a running load."""

    seconds: float
    responses: list[Response]
    """All responses that ended after the window began, those under way at its end included."""
    requests: int
    """All responses that ended inside the window."""
    chunks: float
    """Events that came inside the window, whichever response they belong to; tokens likewise."""
    tokens: float
    failures: dict[str, int]
    cpu_s: dict[str, float]
    """CPU-seconds (user and system) by clock."""


class Connection(asyncio.Protocol):
    """One connection to a loopback port; one request at a time."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._responded: asyncio.Future[None] | None = None
        self._body: list[bytes] = []
        self._begins: Callable[[bytes], bool] = _at_once
        self._first = self.end = 0.0
        self.times: list[float] = []
        """Fields of the last response, as in `Response`."""
        self.events: list[int] = []

    async def post(
        self, request: bytes, begins: Callable[[bytes], bool] | None = None
    ) -> tuple[int, bytes, float, float]:
        """Return status, body, seconds until the body `begins`, and seconds to its end. Raise RequestFailed."""
        if self._transport is None or self._transport.is_closing():
            raise RequestFailed("connection closed")
        self._responded = asyncio.get_running_loop().create_future()
        self._body.clear()
        self._begins = begins or _at_once
        self._first = 0.0
        self.times, self.events = [], []
        sent = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(_REQUEST_S):
            await self._responded
        body = b"".join(self._body)
        return self._parser.get_status_code(), body, (self._first or self.end) - sent, self.end - sent

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one only by duck typing

    def connection_lost(self, exc: Exception | None) -> None:
        if self._responded is not None and not self._responded.done():
            self._responded.set_exception(RequestFailed("connection lost"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        if events := body.count(b"data: "):
            self.times.append(time.perf_counter())
            self.events.append(events)
        if not self._first and self._begins(b"".join(self._body)):
            self._first = time.perf_counter()

    def on_message_complete(self) -> None:
        self.end = time.perf_counter()
        if self._responded is not None and not self._responded.done():
            self._responded.set_result(None)


def _at_once(_body: bytes) -> bool:
    return True


def events_of(body: bytes) -> list[bytes]:
    """Return the data of server-sent events, comments and the names of events left out."""
    events = (event.partition(b"data: ") for event in body.split(b"\n\n") if event[:1] != b":")
    return [data for _, found, data in events if found]


@dataclass(slots=True)
class _Load:
    """A running load: what it has done so far."""

    target: Target
    shape: Shape
    stopping: bool = False
    responses: list[Response] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    async def stream(self, index: int, begun: asyncio.Event) -> None:
        """Request one after another, until `stopping`. The first is shorter, so that streams do not march in step."""
        connection = None
        max_tokens = 1 + index * self.shape.max_tokens // self.shape.streams
        while not self.stopping:
            try:
                connection = connection or await connect(self.target.port)
                self.responses.append(await self._one(connection, index, max_tokens))
            except (RequestFailed, OSError, TimeoutError) as error:
                self.failures[str(error) or type(error).__name__] += 1
                if connection is not None:
                    connection.close()
                connection = None
                await asyncio.sleep(_AFTER_FAILURE_S)
            max_tokens = self.shape.max_tokens
            begun.set()
        if connection is not None:
            connection.close()

    async def _one(self, connection: Connection, index: int, max_tokens: int) -> Response:
        streamed = self.shape.streamed
        request = self.target.request(index, max_tokens, streamed)
        status, body, first_s, whole_s = await connection.post(
            request, lambda body: self.target.begins(body, streamed)
        )
        if status != 200:
            raise RequestFailed(f"{status} {body[:200].decode(errors='replace')}")
        chunks, tokens = self.target.count(events_of(body) if streamed else [body], streamed)
        times, events = (connection.times, connection.events) if streamed else ([], [])
        return Response(first_s, whole_s, chunks, tokens, connection.end, times, events)


async def measure(
    target: Target, shape: Shape, seconds: float, clocks: Mapping[str, Callable[[], float]]
) -> Window:
    """Load `target`, and measure for `seconds` from when every stream has had its first response.

    A slow target gets longer, up to four times `seconds`, until a response a stream has come. Chunks and tokens count where they
    came, not where their response ended, which would flatter fast targets: slow ones begin together and end together. Responses
    under way at the end are waited for, because their latency counts.
    """
    load = _Load(target, shape)
    begun = [asyncio.Event() for _ in range(shape.streams)]
    async with asyncio.TaskGroup() as streams:
        for index, event in enumerate(begun):
            streams.create_task(load.stream(index, event), name=f"stream-{index}")
        for event in begun:
            await event.wait()
        known, failed, cpu = len(load.responses), load.failures.copy(), _read(clocks)
        began = time.perf_counter()
        for _ in range(4):
            await asyncio.sleep(seconds)
            if len(load.responses) - known >= shape.streams:
                break
        ended, end = time.perf_counter(), _read(clocks)
        failures = load.failures - failed
        load.stopping = True
    responses = [response for response in load.responses if response.ended >= began]
    shares = [response.share(began, ended) for response in responses]
    return Window(
        ended - began,
        responses,
        requests=sum(response.ended < ended for response in responses),
        chunks=sum(response.chunks * share for response, share in zip(responses, shares, strict=True)),
        tokens=sum(response.tokens * share for response, share in zip(responses, shares, strict=True)),
        failures=dict(failures),
        cpu_s={name: end[name] - cpu[name] for name in cpu},
    )


def _read(clocks: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    return {name: clock() for name, clock in clocks.items()}


async def connect(port: int) -> Connection:
    """Return a new connection to a loopback port."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    return connection
