"""A process that is being stopped, as its middleware has it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from gateway.api.drain import Drain, Draining


class App:
    """Answers once it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.asked = asyncio.Event()

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        self.asked.set()
        await self.may.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})


def client(app: App, drain: Drain) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Draining(app, drain))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def test_a_call_that_runs_is_waited_for_and_a_new_one_is_refused() -> None:
    app, drain = App(), Drain()
    async with client(app, drain) as http:
        call = asyncio.create_task(http.post("/v1/chat/completions"))
        await app.asked.wait()
        drain.begin()
        assert not await drain.ended(0.0)
        for path in ("/v1/chat/completions", "/e/ep-1/v1/responses"):
            refused = await http.post(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            assert refused.headers["connection"] == "close"
        anthropic = await http.post("/v1/messages")
        assert anthropic.json()["error"]["type"] == "overloaded_error"
        app.may.set()
        assert (await call).status_code == 200
        assert await drain.ended(60.0)
        assert (await http.get("/admin/v1/episodes")).status_code == 200


async def test_nothing_is_waited_for_when_nothing_runs() -> None:
    drain = Drain()
    drain.begin()
    assert await drain.ended(3600.0)


async def test_a_second_begin_ends_the_waiting() -> None:
    app, drain = App(), Drain()
    async with client(app, drain) as http:
        call = asyncio.create_task(http.post("/v1/completions"))
        await app.asked.wait()
        drain.begin()
        drain.begin()
        assert not await drain.ended(3600.0)
        app.may.set()
        await call


async def test_who_waits_for_something_else_is_told_at_the_end() -> None:
    app, drain = App(), Drain()
    async with client(app, drain) as http:
        poll = asyncio.create_task(http.get("/admin/v1/lease"))
        await app.asked.wait()
        drain.begin()
        assert await drain.ended(3600.0)
        assert not poll.done()
        drain.end()
        answer = await poll
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
        assert (await http.get("/admin/v1/lease")).status_code == 503


async def test_a_start_that_is_not_done_is_cancelled() -> None:
    drain = Drain()

    async def start() -> None:
        with drain.opening():
            await asyncio.Event().wait()

    task = asyncio.create_task(start())
    await asyncio.sleep(0)
    drain.begin()
    await asyncio.wait({task})
    assert task.cancelled()
