"""Two hops, client to front and front to back: no request hides in another one, and no response reaches another request.

Both are real servers; clients are raw sockets, so that they can send what no HTTP library sends. The back returns what it has
received, so that each response names its request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.api.middleware.body_limit import BodyLimit
from gateway.api.middleware.forward import Forward
from gateway.config.settings import Settings
from gateway.tenancy.projects import Projects
from headgate.keys import Keyring
from headgate.processes.ports import free_port
from tests.harness.gateways import serve
from tests.harness.waiting import within

AGENT, ROOT, LIMIT = "the-key-of-the-agent", "the-key-of-root", 16 * 2**20
ADMIN, CALL = "/admin/v1/status", "/v1/chat/completions"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE")
HIDDEN = f"GET /admin/v1/hidden HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ROOT}\r\n\r\n".encode()


class Back:
    """The process at the other end."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        received = {
            "method": scope["method"],
            "path": scope["path"],
            "body": body.decode(),
            "headers": headers,
        }
        self.heard.append(received)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(received).encode()})


class Front:
    """A process that follows the one at `url`, as its clients see it."""

    def __init__(self, port: int, url: str) -> None:
        self.port = port
        self.url = url

    async def coordinator(self) -> str | None:
        return self.url

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, *parts: bytes, end: bool = False) -> bytes:
        """Return all that is served on a new connection, until it is closed. `end`: nothing more is sent after that."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
        if end:
            writer.write_eof()
        try:
            async with within("the end of the connection"):
                return await reader.read()
        finally:
            writer.close()

    async def ask(self, name: str) -> dict[str, Any]:
        """Return the response to an ordinary client, which is its own request."""
        response = await self.send(request("GET", f"/admin/v1/{name}", ROOT, "Connection: close\r\n"))
        responded: dict[str, Any] = json.loads(body_of(response))
        assert responded["path"] == f"/admin/v1/{name}"
        return responded


def request(method: str, path: str, key: str, headers: str = "", body: bytes = b"") -> bytes:
    known = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{known}{headers}\r\n".encode() + body


def long(body: bytes, more: str = "Connection: close\r\n") -> str:
    return f"Content-Length: {len(body)}\r\n{more}"


def chunks(body: bytes, size: int = 7) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"


def body_of(response: bytes) -> bytes:
    head, _, rest = response.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        return rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        if not int(size, 16):
            break
    return body


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


@asynccontextmanager
async def front(url: str) -> AsyncIterator[Front]:
    """Before the process at `url`."""
    found = Front(free_port(), url)
    settings = Settings.parse({"models": {"demo": {"path": "nowhere"}}, "admin": {"key": ROOT}})
    agents = Keyring([(AGENT, "agent")])
    forward = Forward(Back(), lambda: found, agents, Projects(settings), "the-key-of-the-cluster", 60.0)
    async with serve(BodyLimit(forward, LIMIT), found.port):
        try:
            yield found
        finally:
            await forward.close()


@pytest.fixture
async def hops() -> AsyncIterator[tuple[Front, Back]]:
    """A front before a back."""
    port, back = free_port(), Back()
    async with serve(back, port), front(f"http://127.0.0.1:{port}") as found:
        yield found, back


Hops = tuple[Front, Back]


@pytest.mark.parametrize("method", METHODS)
async def test_a_body_ends_where_it_ends_with_every_method(hops: Hops, method: str) -> None:
    """The body is sent on whole, and what comes after it belongs to the next request."""
    found, back = hops
    for path, key in ((ADMIN, ROOT), (CALL, AGENT)):
        for headers, body in (
            (long(HIDDEN), HIDDEN),
            ("Transfer-Encoding: chunked\r\nConnection: close\r\n", chunks(HIDDEN)),
        ):
            back.heard.clear()
            assert status(await found.send(request(method, path, key, headers, body))) == 200
            await found.ask("first")
            await found.ask("second")
            received = [(heard["method"], heard["path"], heard["body"].encode()) for heard in back.heard]
            others = [("GET", "/admin/v1/first", b""), ("GET", "/admin/v1/second", b"")]
            assert received == [(method, path, HIDDEN), *others]
            assert back.heard[0]["headers"]["content-length"] == str(len(HIDDEN))


async def test_nothing_is_sent_on_before_its_key_is_checked(hops: Hops) -> None:
    """An agent's key is none of the admin API's."""
    found, back = hops
    for method in METHODS:
        for key in ("", "unknown", AGENT):
            for path in (ADMIN, f"/e/some-episode{ADMIN}"):
                assert status(await found.send(request(method, path, key, long(HIDDEN), HIDDEN))) == 401
    assert back.heard == []


async def test_headers_of_a_connection_stay_with_it(hops: Hops) -> None:
    """The key is not the connection's, whatever its header names: the one that was checked goes on."""
    found, back = hops
    named = "Connection: close, X-Mine, Content-Length, Authorization\r\n"
    own = f"{named}X-Mine: a\r\nKeep-Alive: 5\r\nTE: trailers\r\nProxy-Connection: b\r\n"
    body = f"X-Headgate-Forwarded: a-guess\r\nX-Yours: c\r\nContent-Length: {len(HIDDEN)}\r\n"
    assert status(await found.send(request("PUT", ADMIN, ROOT, own + body, HIDDEN))) == 200
    (heard,) = back.heard
    assert heard["body"].encode() == HIDDEN
    assert set(heard["headers"]) == {
        "host",
        "authorization",
        "x-yours",
        "x-headgate-forwarded",
        "content-length",
    }
    assert heard["headers"]["x-headgate-forwarded"] == "the-key-of-the-cluster"


async def test_the_front_responds_to_expect_100_continue(hops: Hops) -> None:
    found, back = hops
    reader, writer = await found.connect()
    writer.write(request("DELETE", ADMIN, ROOT, long(HIDDEN, "Expect: 100-continue\r\n")))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert back.heard == [], "nothing is sent on before the body is there"
    writer.write(HIDDEN)
    assert status(await reader.readuntil(b"\r\n\r\n")) == 200
    writer.close()
    assert [heard["body"].encode() for heard in back.heard] == [HIDDEN]
    assert "expect" not in back.heard[0]["headers"]


@pytest.mark.parametrize("length", [len(HIDDEN), LIMIT + 1])
async def test_a_connection_is_closed_if_its_body_is_not_requested(hops: Hops, length: int) -> None:
    """A client may take the response for leave to send its next request, and the server that request for the body."""
    found, back = hops
    key = "unknown" if length <= LIMIT else ROOT
    head = f"Expect: 100-continue\r\nContent-Length: {length}\r\n"
    response = await found.send(request("POST", ADMIN, key, head))
    assert status(response) in (400, 401) and response.count(b"HTTP/1.1") == 1
    assert b"connection: close" in response
    assert back.heard == []


async def test_a_body_that_does_not_come_is_not_sent_on(hops: Hops) -> None:
    found, back = hops
    assert await found.send(request("POST", ADMIN, ROOT, long(HIDDEN), HIDDEN[:-1]), end=True) == b""
    half = b"5\r\nhello\r\n"
    framed = request("GET", ADMIN, ROOT, "Transfer-Encoding: chunked\r\n", half)
    assert await found.send(framed, end=True) == b""
    await found.ask("next")
    assert [heard["path"] for heard in back.heard] == ["/admin/v1/next"]


LIES = (
    f"Content-Length: 4\r\nContent-Length: {len(HIDDEN)}\r\n",
    "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
    "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    "Transfer-Encoding: chunked, identity\r\n",
    "Transfer-Encoding : chunked\r\n",
    "Content-Length: +4\r\n",
    "Content-Length: 4,4\r\n",
    "Content-Length: 0x4\r\n",
    "Content-Length:\r\n 4\r\n",
)


async def test_lengths_that_lie_are_refused_by_the_front(hops: Hops) -> None:
    found, back = hops
    for lie in LIES:
        response = await found.send(request("POST", ADMIN, ROOT, lie, b"0\r\n\r\n" + HIDDEN), end=True)
        assert status(response) == 400 and response.count(b"HTTP/1.1 ") == 1, lie
    assert back.heard == []


async def test_what_comes_after_a_body_is_a_request_of_the_same_client(hops: Hops) -> None:
    """Several requests on one connection, sent together: each has its own response, in their order."""
    found, back = hops
    names = [f"{method}-{n}" for n, method in enumerate(("POST", "GET", "DELETE", "GET", "PUT"))]
    sent = [
        request(name.partition("-")[0], f"/admin/v1/{name}", ROOT, long(HIDDEN, ""), HIDDEN) for name in names
    ]
    last = request("GET", "/admin/v1/last", ROOT, "Connection: close\r\n")
    responses = await found.send(b"".join(sent), last)
    received = [json.loads(body_of(response))["path"] for response in responses.split(b"HTTP/1.1 200")[1:]]
    assert received == [f"/admin/v1/{name}" for name in [*names, "last"]]
    assert [heard["path"] for heard in back.heard] == received


@pytest.mark.parametrize("cut", [False, True])
async def test_an_upgrade_that_is_not_done_hides_nothing(hops: Hops, cut: bool) -> None:
    """uvicorn's parser takes such a head for the whole request, and what comes in the next packet for the next one."""
    found, back = hops
    for method in METHODS:
        head = request(method, ADMIN, ROOT, long(HIDDEN, "Connection: Upgrade\r\nUpgrade: h2c\r\n"))
        reader, writer = await found.connect()
        writer.write(head if cut else head + HIDDEN)
        response = await reader.readuntil(b"\r\n\r\n")
        writer.write(HIDDEN if cut else b"")
        rest = await reader.read()
        writer.close()
        assert status(response) == 400 and b"connection: close" in response
        assert b"HTTP/1.1 2" not in rest and (method == "HEAD" or b"upgrade_with_body" in rest)
    alone = await found.send(request("GET", ADMIN, ROOT, "Connection: Upgrade\r\nUpgrade: h2c\r\n"))
    assert status(alone) == 200
    await found.ask("next")
    assert [heard["path"] for heard in back.heard] == [ADMIN, "/admin/v1/next"]


@asynccontextmanager
async def scripted(*responses: bytes) -> AsyncIterator[tuple[Front, list[bytes]]]:
    """A front before a server that reads the head of one request a connection, and the first lines of these.

    It responds by `responses`, and closes the connection after half a response, but not after a whole one.
    """
    requests: list[bytes] = []
    over = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        response = responses[len(requests)]
        requests.append(head.split(b" HTTP")[0])
        writer.write(response)
        if response != HALF:
            await over.wait()
        writer.close()

    port = free_port()
    async with (
        await asyncio.start_server(talk, "127.0.0.1", port),
        front(f"http://127.0.0.1:{port}") as found,
    ):
        yield found, requests
        over.set()


HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"


def whole(name: str) -> bytes:
    body = json.dumps({"path": f"/admin/v1/{name}"}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def test_a_connection_that_was_served_before_its_request_was_read_is_not_used_again() -> None:
    """The back responds and reads no further, and the body is more than connections hold: the rest would be the next one's."""
    body = HIDDEN + b" " * (LIMIT - len(HIDDEN))
    async with scripted(whole("early"), whole("next")) as (found, requests):
        assert status(await found.send(request("POST", ADMIN, ROOT, long(body), body))) == 200
        await found.ask("next")
        assert requests == [b"POST /admin/v1/status", b"GET /admin/v1/next"]


async def test_a_response_that_breaks_off_breaks_off_for_the_client_too() -> None:
    async with scripted(HALF, whole("next")) as (found, requests):
        response = await found.send(request("GET", ADMIN, ROOT))
        assert b"content-length: 100" in response and response.endswith(b"\r\n\r\nhalf")
        await found.ask("next")
        assert requests == [b"GET /admin/v1/status", b"GET /admin/v1/next"]
