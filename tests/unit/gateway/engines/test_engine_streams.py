"""Streams of events from engines: which connections are used again, and what becomes of responses that are not whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from gateway.engines.http import EngineHTTP
from headgate.errors import EngineRefused, EngineUnreachable
from tests.harness.waiting import turns, until, within

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def part(content: bytes) -> bytes:
    """Return a part of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


class Server:
    """Respond to each request with the next of `responses`, which are bytes or write them."""

    def __init__(self, *responses: bytes | Callable[[Server, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.requests: list[tuple[int, bytes]] = []
        """The number of the connection, and the request."""
        self.left = asyncio.Event()
        """A client has closed its connection."""
        self._responses = list(responses)
        self._connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append((number, head + await reader.readexactly(size)))
                response = self._responses.pop(0)
                if isinstance(response, bytes):
                    writer.write(response)
                else:
                    await response(self, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server, silence_s: float = 60.0, path: str = "") -> AsyncIterator[EngineHTTP]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    http = EngineHTTP("e", f"http://127.0.0.1:{port}{path}", silence_s)
    try:
        yield http
    finally:
        await http.close()
        listener.close()


async def events(http: EngineHTTP, news: list[str] | None = None) -> list[dict[str, Any]]:
    async def on_new() -> None:
        if news is not None:
            news.append("new")

    async with within("the stream ends"):
        return [event async for event in http.events("/generate", {"a": [1]}, on_new)]


async def test_a_connection_is_used_again_and_a_new_one_is_reported() -> None:
    whole = HEAD + part(b'data: {"n": 1}\n\n') + part(DONE) + END
    news: list[str] = []
    server = Server(whole, whole)
    async with serving(server, path="/v/e%20f") as http:
        assert [await events(http, news), await events(http, news)] == [[{"n": 1}]] * 2
    assert [number for number, _ in server.requests] == [1, 1] and news == ["new"]
    head, _, body = server.requests[0][1].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v/e%20f/generate HTTP/1.1\r\nhost: 127.0.0.1:") and body == b'{"a":[1]}'


LONG = b'data: {"n": "%b"}\n\n' % (b"x" * 200_000)


@pytest.mark.parametrize("cut", [len(LONG) - 1, len(LONG) - 2, len(LONG) + 5, 150_000])
async def test_a_long_event_comes_whole_wherever_it_is_cut(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the newlines that end it, and within the event that follows."""
    whole = LONG + b'data: {"n": 1}\n\n' + DONE
    pieces = [whole[:70_000], whole[70_000:140_000], whole[140_000:cut], whole[cut:], b""]
    response = Mock(status=200, new=False, read=AsyncMock(side_effect=pieces))
    async with serving(Server()) as http:
        monkeypatch.setattr(http._streams, "post", AsyncMock(return_value=response))
        first, second = await events(http)
    assert (len(first["n"]), second) == (200_000, {"n": 1})


async def test_a_connection_whose_response_ends_after_its_last_event_is_used_again() -> None:
    ended = asyncio.Event()

    async def late(_: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + part(DONE))
        await ended.wait()
        writer.write(END)

    server = Server(late, HEAD + part(DONE) + END, HEAD + part(DONE) + END)
    async with serving(server) as http:
        await events(http)
        await events(http)  # the first connection is not free yet
        ended.set()
        await until(lambda: len(http._streams._idle) == 2, "the first connection is free", every_s=0)
        await events(http)
    assert [number for number, _ in server.requests] == [1, 2, 1]


async def test_who_leaves_amid_a_stream_closes_the_connection_so_that_the_engine_stops() -> None:
    async def on_and_on(server: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + part(b'data: {"n": 1}\n\n'))

    server = Server(on_and_on)
    async with serving(server) as http:
        async with aclosing(http.events("/generate", {})) as stream:
            assert await anext(stream) == {"n": 1}
        async with within("the engine learns of it"):
            await server.left.wait()


@pytest.mark.parametrize(
    ("response", "match"),
    [
        (HEAD + part(b'data: {"n": 1}\n\n'), "closed"),
        (b"not at all HTTP\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", "503"),
    ],
)
async def test_what_came_of_a_broken_response_is_read_before_it_fails(response: bytes, match: str) -> None:
    async def breaks(_: Server, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        await writer.drain()
        writer.close()

    found = []

    async def read(http: EngineHTTP) -> None:
        async for event in http.events("/generate", {}):
            found.append(event)

    async with serving(Server(breaks)) as http:
        with pytest.raises(EngineUnreachable, match=match):
            await read(http)
    assert found == ([{"n": 1}] if response.startswith(HEAD) else [])


async def test_a_refusal_is_quoted_and_a_silent_engine_given_up() -> None:
    async def nothing(_: Server, writer: asyncio.StreamWriter) -> None:
        """Send no bytes."""

    refused = b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 No\r\ncontent-length: 18\r\n\r\n{"message": "odd"}'
    async with serving(Server(refused, nothing), silence_s=0.05) as http:
        with pytest.raises(EngineRefused) as error:
            await events(http)
        assert error.value.message.endswith("400: odd")
        with pytest.raises(EngineUnreachable, match="no response in time"):
            await events(http)


async def test_a_long_response_waits_in_the_connection_for_a_slow_reader_and_is_whole() -> None:
    sent = [b'data: {"n": %d, "fill": "%b"}\n\n' % (n, b"x" * 50_000) for n in range(400)]
    written = 0

    async def long(_: Server, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(HEAD)
        for event in sent:
            writer.write(part(event))
            await writer.drain()
            written += 1
        writer.write(part(DONE) + END)

    async with serving(Server(long)) as http, aclosing(http.events("/generate", {})) as stream:
        assert (await anext(stream))["n"] == 0
        before = -1
        while before < written:  # until the sender is held up
            before = written
            await turns(200)
        assert written < len(sent)
        assert [event["n"] async for event in stream] == list(range(1, 400))
