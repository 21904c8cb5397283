"""What a client may send before anything knows it, how long that may take, and how connections end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.api.middleware.body_limit import BodyLimit
from gateway.connection import Connection
from headgate.processes.ports import free_port
from tests.harness.gateways import serve
from tests.harness.waiting import turns, within


class Quick(Connection):
    """Wait for nothing."""

    window_s = 0.0


class App:
    """Reply with a stream, once it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.received = asyncio.Event()
        self.left = asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        self.received.set()
        gone = asyncio.create_task(receive())
        may = asyncio.create_task(self.may.wait())
        await asyncio.wait({gone, may}, return_when=asyncio.FIRST_COMPLETED)
        if not self.may.is_set():
            self.left.set()
            return
        gone.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"data: 1\n\n", b"", b"data: 2\n\n"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def exchange(app: Any, data: bytes, *, http: type[Connection] = Connection, end: bool = False) -> bytes:
    """Send bytes, and return what the server sends until it closes the connection. `end`: the client closes its sending side."""
    port = free_port()
    async with serve(app, port, http):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            if end:
                writer.write_eof()
            async with within("the end of the connection"):
                return await reader.read()
        finally:
            writer.close()


async def goes_on(writer: asyncio.StreamWriter) -> None:
    """Send the same without an end, as long as the connection takes it."""
    async with within("the connection is closed"):
        while True:
            writer.write(b"a" * 65_536)
            await writer.drain()


def responding() -> App:
    app = App()
    app.may.set()
    return app


GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "head",
    [b"X-A: " + b"a" * 70_000 + b"\r\n\r\n", b"".join(b"X-%d: a\r\n" % n for n in range(600)) + b"\r\n"],
)
async def test_a_head_that_is_too_large_is_refused(head: bytes) -> None:
    app = responding()
    response = await exchange(app, GET + head)
    assert response.startswith(b"HTTP/1.1 431") and b'"head_too_large"' in response
    assert not app.received.is_set()


async def test_a_head_without_an_end_is_not_kept() -> None:
    app, port = responding(), free_port()
    async with serve(app, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"X-A: ")
        with pytest.raises(ConnectionError):
            await goes_on(writer)
        writer.close()
    assert not app.received.is_set()


async def test_an_ordinary_head_and_a_long_body_are_taken() -> None:
    app = responding()
    body = b"b" * 3_000_000
    head = b"".join(b"X-%d: %b\r\n" % (n, b"a" * 100) for n in range(300))
    response = await exchange(app, GET + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert response.startswith(b"HTTP/1.1 200") and app.bodies == [body]


@pytest.mark.parametrize("began", [b"GET / HT", GET, GET + b"Content-Length: 9\r\n\r\n1234"])
async def test_a_request_that_does_not_arrive_is_given_up(began: bytes) -> None:
    app = responding()
    response = await exchange(app, began, http=Quick)
    assert response.startswith(b"HTTP/1.1 408") and b'"request_too_slow"' in response
    assert app.bodies == []


async def test_a_call_may_take_longer_than_its_request() -> None:
    app, port = App(), free_port()
    async with serve(app, port, Quick):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        await app.received.wait()
        await turns(10)
        app.may.set()
        async with within("the response"):
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_client_that_closes_its_sending_side_gets_its_response() -> None:
    response = await exchange(responding(), GET.replace(b"Connection: close\r\n", b"") + b"\r\n", end=True)
    interim, _, last = response.rpartition(b"HTTP/1.1 200 OK\r\n")
    assert interim.replace(b"HTTP/1.1 102 Processing\r\n\r\n", b"") == b""
    assert b"data: 1\n\n" in last and last.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_that_has_gone_is_noticed_before_its_response(version: bytes) -> None:
    """To the server it looks as one that closed its sending side alone."""
    app, port = App(), free_port()
    async with serve(app, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/%b\r\nHost: x\r\n\r\n" % version)
        await app.received.wait()
        writer.close()
        async with within("the application hears of it"):
            await app.left.wait()


async def test_a_stream_to_http_1_0_has_no_chunks() -> None:
    response = await exchange(responding(), b"GET / HTTP/1.0\r\n\r\n")
    head, _, body = response.partition(b"\r\n\r\n")
    assert body == b"data: 1\n\ndata: 2\n\n"
    assert b"transfer-encoding" not in head and b"connection: close" in head


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n",
        b"GET http://localhost/ HTTP/1.0\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n",
        b"GET / HTTP/1.1\r\nHost: \r\n",
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost:\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
    ],
)
async def test_a_request_that_does_not_name_one_host_is_refused(head: bytes) -> None:
    app = responding()
    response = await exchange(app, head + b"\r\n")
    assert response.startswith(b"HTTP/1.1 400") and b'"code":"invalid_host"' in response
    assert not app.received.is_set()


async def test_what_is_no_http_is_refused_as_json() -> None:
    response = await exchange(responding(), b"\x16\x03\x01 hello\r\n\r\n")
    assert response.startswith(b"HTTP/1.1 400") and b'"code":"invalid_http"' in response


@pytest.mark.parametrize(
    "coding", [b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked"]
)
async def test_a_transfer_coding_that_is_unknown_is_not_taken_for_chunks(coding: bytes) -> None:
    app = responding()
    response = await exchange(BodyLimit(app, 1000), GET + coding + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert response.startswith(b"HTTP/1.1 501") and b'"unknown_transfer_coding"' in response
    assert not app.received.is_set()
