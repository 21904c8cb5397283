"""What is sent on to another process: again if it was not begun there, and never if it may have been."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.api.drain import Drain, Draining
from gateway.api.forward import Forward
from gateway.keys import Keyring
from scheduler.cluster.local import free_port
from tests.gateways import serve

KEY, BODY = "the-key-of-the-agent", b"one" * 1000
URL = "http://gateway/v1/chat/completions"


class Process:
    """Another gateway process: `drain` says whether it takes calls."""

    def __init__(self, *, reads: bool = False) -> None:
        """`reads`: what it does not take, too."""
        self.drain = Drain()
        self.heard: list[bytes] = []
        self.asked = asyncio.Event()
        self.url = ""
        self._reads = reads

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            if self._reads:
                await whole(receive)
            self.asked.set()
        await Draining(self._answer, self.drain)(scope, receive, send)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.heard.append(await whole(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.heard[-1]})


class Here:
    """This process's place."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.decides = False

    async def coordinator(self) -> str | None:
        """See `Place`."""
        return None if self.decides else self.url


async def whole(receive: Any) -> bytes:
    """A request's body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


@asynccontextmanager
async def world(
    *processes: Process, **given: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Here, list[bytes]]]:
    """A client of a process that follows the first of others; what is answered here is in the list."""
    async with AsyncExitStack() as stack:
        for process in processes:
            port = free_port()
            await stack.enter_async_context(serve(process, port))
            process.url = f"http://127.0.0.1:{port}"
        here, own = Here(processes[0].url), Process()
        settings: dict[str, Any] = {"wait_s": 60.0, "limit": 10**6, **given}
        forward = Forward(own, lambda: here, Keyring([(KEY, "agent")]), "the-key-of-the-cluster", **settings)
        stack.push_async_callback(closed, forward)
        transport = httpx.ASGITransport(forward)  # type: ignore[arg-type]
        headers = {"Authorization": f"Bearer {KEY}"}
        client = httpx.AsyncClient(transport=transport, headers=headers, timeout=60.0)
        yield await stack.enter_async_context(client), here, own.heard


async def closed(forward: Forward) -> None:
    if forward._session is not None:
        await forward._session.close()


async def parts() -> AsyncIterator[bytes]:
    for _ in range(3):
        yield BODY


async def changed(process: Process, change: Callable[[], None]) -> None:
    """Once a process was asked."""
    await process.asked.wait()
    change()


async def test_what_a_process_that_ends_did_not_begin_is_asked_of_its_successor() -> None:
    first, second = Process(), Process()
    first.drain.begin()
    async with world(first, second) as (client, here, own):
        asking = asyncio.create_task(client.post(URL, content=parts()))
        await changed(first, lambda: setattr(here, "url", second.url))
        answer = await asking
        assert (answer.status_code, answer.content) == (200, 3 * BODY)
        assert (first.heard, second.heard, own) == ([], [3 * BODY], [])


async def test_the_successor_may_be_this_process() -> None:
    first = Process()
    first.drain.begin()
    async with world(first) as (client, here, own):
        asking = asyncio.create_task(client.post(URL, content=parts()))
        await changed(first, lambda: setattr(here, "decides", True))
        assert (await asking).content == 3 * BODY
        assert (first.heard, own) == ([], [3 * BODY])


async def test_who_waits_too_long_is_told_to_come_again() -> None:
    first = Process()
    first.drain.begin()
    async with world(first, wait_s=0.0) as (client, _, own):
        answer = await client.post(URL, content=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_coordinator")
        assert int(answer.headers["retry-after"]) >= 1
        assert own == []


async def test_a_body_that_was_not_kept_is_not_sent_again() -> None:
    first, second = Process(reads=True), Process()
    first.drain.begin()
    async with world(first, second, limit=10) as (client, here, own):
        asking = asyncio.create_task(client.post(URL, content=parts()))
        await changed(first, lambda: setattr(here, "url", second.url))
        assert (await asking).status_code == 503
        assert second.heard == own == []


async def test_what_may_have_been_done_is_not_done_again() -> None:
    """A process takes the request, and goes away before it answers."""
    first, second, asked = Process(), Process(), []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        here.url = second.url
        writer.close()

    port = free_port()
    async with await asyncio.start_server(take, "127.0.0.1", port), world(first, second) as found:
        client, here, own = found
        here.url = f"http://127.0.0.1:{port}"
        answer = await client.post(URL, content=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "coordinator_lost")
        assert (len(asked), first.heard, second.heard, own) == (1, [], [], [])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/admin/v1/status"])
async def test_a_process_that_coordinates_no_more_passes_nothing_on(path: str) -> None:
    """It says that it has not begun, and so the sender waits for the next coordinator."""
    first = Process()
    async with world(first) as (client, _, own):
        headers = {"x-headgate-forwarded": "the-key-of-the-cluster"}
        answer = await client.post(f"http://gateway{path}", headers=headers, content=BODY)
        assert answer.status_code == 503 and answer.headers["x-headgate-not-begun"]
        assert (first.heard, own) == ([], [])
