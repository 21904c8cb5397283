"""Requests sent on to another process: again if it was not begun there, never if it may have been or the client has left."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.api.middleware.body_limit import BodyLimit
from gateway.api.middleware.drain import Drain, Draining
from gateway.api.middleware.forward import Forward
from gateway.config.settings import Settings
from gateway.tenancy.projects import Projects
from headgate.errors import OwnedByPeer
from headgate.keys import Keyring
from headgate.processes.ports import free_port
from tests.harness.gateways import serve
from tests.harness.waiting import within

KEY, BODY = "the-key-of-the-agent", b"one" * 1000
URL = "http://gateway/v1/chat/completions"


class Process:
    """Another gateway process: `drain` decides whether it accepts calls."""

    def __init__(self, *, reads: bool = False) -> None:
        """Read rejected requests too, with `reads`."""
        self.drain = Drain()
        self.bodies: list[bytes] = []
        self.called = asyncio.Event()
        self.url = ""
        self._reads = reads

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if self._reads:
                await whole(receive)
            self.called.set()
        await Draining(self._respond, self.drain)(scope, receive, send)

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.bodies.append(await whole(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.bodies[-1]})


class Here:
    """This process's place."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.decides = False

    async def coordinator(self) -> str | None:
        return None if self.decides else self.url


async def whole(receive: Any) -> bytes:
    """Return a request's body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


@asynccontextmanager
async def world(
    *processes: Process, **given: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Here, list[bytes]]]:
    """Yield a client of a process that follows the first of others; what is served here is in the list."""
    async with AsyncExitStack() as stack:
        for process in processes:
            port = free_port()
            await stack.enter_async_context(serve(process, port))
            process.url = f"http://127.0.0.1:{port}"
        here, own = Here(processes[0].url), Process()
        forward = forwarding(own, here, **given)
        stack.push_async_callback(forward.close)
        transport = httpx.ASGITransport(forward)  # type: ignore[arg-type]
        headers = {"Authorization": f"Bearer {KEY}"}
        client = httpx.AsyncClient(transport=transport, headers=headers, timeout=60.0)
        yield await stack.enter_async_context(client), here, own.bodies


def forwarding(app: Any, place: Here, wait_s: float = 60.0) -> Forward:
    """Return an application in a process at a place, with one agent and no admin key."""
    projects = Projects(Settings.parse({"models": {"demo": {"path": "nowhere"}}}))
    return Forward(app, lambda: place, Keyring([(KEY, "agent")]), projects, "the-key-of-the-cluster", wait_s)


async def parts() -> AsyncIterator[bytes]:
    for _ in range(3):
        yield BODY


async def changed(process: Process, change: Callable[[], None]) -> None:
    """Call `change` once the process has a request."""
    await process.called.wait()
    change()


async def test_a_request_that_a_stopping_process_did_not_begin_goes_to_its_successor() -> None:
    first, second = Process(), Process()
    first.drain.begin()
    async with world(first, second) as (client, here, own):
        request = asyncio.create_task(client.post(URL, content=parts()))
        await changed(first, lambda: setattr(here, "url", second.url))
        response = await request
        assert (response.status_code, response.content) == (200, 3 * BODY)
        assert (first.bodies, second.bodies, own) == ([], [3 * BODY], [])


async def test_the_successor_may_be_this_process() -> None:
    first = Process()
    first.drain.begin()
    async with world(first) as (client, here, own):
        request = asyncio.create_task(client.post(URL, content=parts()))
        await changed(first, lambda: setattr(here, "decides", True))
        assert (await request).content == 3 * BODY
        assert (first.bodies, own) == ([], [3 * BODY])


async def test_a_request_that_waits_too_long_gets_503_with_retry_after() -> None:
    first = Process()
    first.drain.begin()
    async with world(first, wait_s=0.0) as (client, _, own):
        response = await client.post(URL, content=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_coordinator")
        assert int(response.headers["retry-after"]) >= 1
        assert own == []


async def test_a_body_over_the_limit_is_not_sent_on() -> None:
    first = Process()
    async with world(first) as (_, here, own):
        forward = forwarding(own, here)
        limited = httpx.ASGITransport(BodyLimit(forward, 1000))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=limited, headers={"Authorization": f"Bearer {KEY}"}) as client:
            response = await client.post(URL, content=parts())
            assert (response.status_code, response.json()["error"]["code"]) == (400, "body_too_large")
        await forward.close()
        assert first.bodies == own == []


async def test_what_may_have_been_done_is_not_done_again() -> None:
    """A process takes the request, and goes away before it responds."""
    first, second, called = Process(), Process(), []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.append(await reader.readuntil(b"\r\n\r\n"))
        here.url = second.url
        writer.close()

    port = free_port()
    async with await asyncio.start_server(take, "127.0.0.1", port), world(first, second) as found:
        client, here, own = found
        here.url = f"http://127.0.0.1:{port}"
        response = await client.post(URL, content=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "coordinator_lost")
        assert (len(called), first.bodies, second.bodies, own) == (1, [], [], [])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/admin/v1/status"])
async def test_a_process_that_coordinates_no_more_passes_nothing_on(path: str) -> None:
    """The refusal states that the request was not started, so the sender waits for the next coordinator."""
    first = Process()
    async with world(first) as (client, _, own):
        headers = {"x-headgate-forwarded": "the-key-of-the-cluster"}
        response = await client.post(f"http://gateway{path}", headers=headers, content=BODY)
        assert response.status_code == 503 and response.headers["x-headgate-not-begun"]
        assert (first.bodies, own) == ([], [])


class Slow:
    """A process that responds when its client has left."""

    def __init__(self) -> None:
        self.called, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await whole(receive)
            self.called.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()


async def leave(port: int, called: asyncio.Event) -> None:
    """Send a request, and disconnect once a process has read it."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
    await called.wait()
    # A reset: one that only closes may still read its response, as far as the server knows.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


@pytest.mark.parametrize("by", ["coordinator", "elsewhere"])
async def test_the_other_process_sees_that_the_client_has_left(by: str) -> None:
    """Also before anything is served, so that what is not streamed ends with its client."""
    slow, back, front = Slow(), free_port(), free_port()
    place = Here(f"http://127.0.0.1:{back}")

    async def here(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await whole(receive)
            raise OwnedByPeer(place.url, alive)

    async def alive() -> bool:
        return True

    forward = forwarding(here, place)
    place.decides = by == "elsewhere"
    async with within("the request is given up at the other side"), serve(slow, back), serve(forward, front):
        await leave(front, slow.called)
        await slow.left.wait()
        await forward.close()


async def test_a_request_whose_client_has_left_is_not_sent_on() -> None:
    """The client leaves while there is no coordinator."""
    first, front, found, called = Process(), free_port(), asyncio.Event(), asyncio.Event()

    class Searching(Here):
        async def coordinator(self) -> str | None:
            called.set()
            await found.wait()
            return self.url

    async with within("the requests are refused or answered"), world(first) as (client, here, own):
        forward = forwarding(own, Searching(here.url))
        ended = asyncio.Event()

        async def observed(scope: Any, receive: Any, send: Any) -> None:
            await forward(scope, receive, send)
            ended.set()

        async with serve(observed, front):
            await leave(front, called)
            # By the time that another connection is open, the server has seen the first one reset.
            _, writer = await asyncio.open_connection("127.0.0.1", front)
            writer.close()
            ended.clear()
            found.set()
            await ended.wait()
            await forward.close()
        assert first.bodies == own == []
        assert (await client.post(URL, content=BODY)).content == BODY
