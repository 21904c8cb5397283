"""A process that is being stopped, as its middleware has it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.api.middleware.drain import Drain, Draining
from tests.harness.waiting import turns, until


class App:
    """Respond once `may` is set."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.called = asyncio.Event()

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        self.called.set()
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
        await app.called.wait()
        drain.begin()
        assert not await drain.ended(0.0)
        for path in ("/v1/chat/completions", "/e/ep-1/v1/responses"):
            refused = await http.post(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            assert refused.headers["connection"] == "close"
            assert refused.headers["x-should-retry"] == "true"
            assert refused.headers["x-headgate-not-begun"]
        anthropic = await http.post("/v1/messages")
        assert anthropic.json()["error"]["type"] == "overloaded_error"
        app.may.set()
        assert (await call).status_code == 200
        assert await drain.ended(60.0)
        assert (await http.get("/admin/v1/episodes")).status_code == 200


async def test_only_what_runs_keeps_the_end_waiting_and_it_does() -> None:
    """Calls that were over before, or end while others run, do not end the waiting."""
    first, second, drain = App(), App(), Drain()
    first.may.set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (second if scope["path"] == "/v1/completions" else first)(scope, receive, send)

    async with client(app, drain) as http:  # type: ignore[arg-type]
        assert (await http.post("/v1/responses")).status_code == 200
        first.may.clear()
        one, two = (asyncio.create_task(http.post(f"/v1/{name}")) for name in ("completions", "responses"))
        await until(lambda: drain.running == 2, "both calls run")
        drain.begin()
        end = asyncio.create_task(drain.ended(3600.0))
        first.may.set()
        assert (await two).status_code == 200
        await turns()
        assert not end.done()
        second.may.set()
        assert (await one).status_code == 200
        assert await end


async def test_a_second_begin_ends_the_waiting() -> None:
    app, drain = App(), Drain()
    async with client(app, drain) as http:
        call = asyncio.create_task(http.post("/v1/completions"))
        await app.called.wait()
        drain.begin()
        drain.begin()
        assert not await drain.ended(3600.0)
        app.may.set()
        await call


async def test_a_request_that_waits_for_an_event_gets_an_error_at_the_end() -> None:
    app, drain = App(), Drain()
    async with client(app, drain) as http:
        poll = asyncio.create_task(http.get("/admin/v1/lease"))
        await app.called.wait()
        drain.begin()
        assert await drain.ended(3600.0)
        assert not poll.done()
        drain.end()
        response = await poll
        assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")
        assert (await http.get("/admin/v1/lease")).status_code == 503


async def test_a_call_without_a_response_gets_an_error_at_the_end_and_a_stream_continues() -> None:
    waits, drain = App(), Drain()
    sent, go_on = asyncio.Event(), asyncio.Event()

    async def streams(scope: Any, _receive: Any, send: Any) -> None:
        if scope["path"] != "/v1/streams":
            return await waits(scope, _receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sent.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"whole"})

    async with client(streams, drain) as http:  # type: ignore[arg-type]
        call = asyncio.create_task(http.post("/v1/chat/completions"))
        stream = asyncio.create_task(http.post("/v1/streams"))
        await asyncio.gather(waits.called.wait(), sent.wait())
        drain.begin()
        assert not await drain.ended(0.0)
        drain.end()
        response = await call
        assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")
        assert int(response.headers["retry-after"]) >= 1
        assert "x-headgate-not-begun" not in response.headers  # it may have taken effect
        go_on.set()
        assert (await stream).content == b"whole"
        assert drain.running == 0


async def test_an_app_that_runs_out_of_time_by_itself_is_no_end() -> None:
    async def late(_scope: Any, _receive: Any, _send: Any) -> None:
        raise TimeoutError("its own")

    async with client(late, Drain()) as http:  # type: ignore[arg-type]
        with pytest.raises(TimeoutError, match="its own"):
            await http.get("/admin/v1/lease")


async def test_a_call_that_fails_is_over() -> None:
    async def fail(_scope: Any, _receive: Any, _send: Any) -> None:
        raise RuntimeError("it failed")

    drain = Drain()
    async with client(fail, drain) as http:  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            await http.post("/v1/chat/completions")
    drain.begin()
    assert await drain.ended(3600.0)


async def test_a_start_that_is_not_done_is_cancelled() -> None:
    drain = Drain()

    async def start() -> None:
        with drain.opening():
            await asyncio.Event().wait()

    task = asyncio.create_task(start())
    await turns(1)
    drain.begin()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_who_has_opened_is_not_cancelled() -> None:
    drain = Drain()

    async def live() -> str:
        with drain.opening():
            await turns(1)
        drain.begin()
        await turns(1)
        return "it ends by itself"

    assert await asyncio.create_task(live()) == "it ends by itself"


async def test_a_link_between_processes_is_never_refused() -> None:
    """Followers stay linked until the last call has ended; then the link itself ends."""
    drain, served = Drain(), asyncio.Event()

    async def link(scope: Any, _receive: Any, _send: Any) -> None:
        assert scope["type"] == "websocket"
        served.set()
        await asyncio.Event().wait()

    drain.begin()
    drain.end()

    async def nothing(*_: Any) -> Any:
        raise AssertionError("only the link may use it")

    scope = {"type": "websocket", "path": "/peers/v1/link"}
    task = asyncio.create_task(Draining(link, drain)(scope, nothing, nothing))
    await asyncio.wait({task, asyncio.create_task(served.wait())}, return_when=asyncio.FIRST_COMPLETED)
    drain.end()
    await turns(1)
    assert (served.is_set(), task.done()) == (True, False)
    task.cancel()
    await asyncio.wait({task})
