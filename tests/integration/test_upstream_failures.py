"""Upstream models that refuse, fail, hang or break off; clients and episodes that end before the response does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway
from tests.harness.upstream import (
    EVENTS,
    Elsewhere,
    behind,
    call_of,
    event,
    events,
    streaming,
    whole_or_streamed,
)
from tests.harness.waiting import result_of, until


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_keeps_its_status_its_body_and_its_advice(
    relayed: tuple[RunningGateway, Elsewhere], stream: bool
) -> None:
    gateway, there = relayed
    body = {"error": {"message": "slow down", "type": "requests", "param": None, "code": "rate", "more": 1}}

    async def respond(_body: dict[str, Any]) -> Response:
        return JSONResponse(body, 429, {"retry-after": "17", "x-should-retry": "true", "x-secret": "1"})

    there.respond = respond
    episode, headers = await gateway.open("task")
    response = await gateway.chat(headers, model="oracle", stream=stream)
    assert (response.status_code, response.json()) == (429, body)
    assert response.headers["content-type"] == "application/json"
    assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("17", "true")
    assert "x-secret" not in response.headers
    call, exchange = await call_of(gateway, episode)
    assert (call["finish_reason"], exchange["status"], json.loads(exchange["response"])) == (
        "error",
        429,
        body,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_is_not_there(tiny_model: Path, tmp_path: Path, stream: bool) -> None:
    port = free_port()
    async with behind(tiny_model, tmp_path, port) as gateway:
        _, headers = await gateway.open("task")
        response = await gateway.chat(headers, model="oracle", stream=stream)
        assert response.status_code == 502
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "upstream_unreachable")
        assert "'send the request to the upstream of oracle'" in error["message"]
        assert str(port) not in error["message"], "where it is, is nothing for agents"
        assert (await gateway.chat(headers, model="demo", max_tokens=2)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_does_not_respond_in_time(
    elsewhere: tuple[Elsewhere, int], tiny_model: Path, tmp_path: Path, stream: bool
) -> None:
    there, port = elsewhere

    async def respond(_body: dict[str, Any]) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    there.respond = respond
    async with behind(tiny_model, tmp_path, port, upstream={"timeout_s": 0.3}) as gateway:
        _, headers = await gateway.open("task")
        response = await gateway.chat(headers, model="oracle", stream=stream)
        assert response.status_code == 504
        error = response.json()["error"]
        assert error["code"] == "upstream_timeout"
        assert "'send the request to the upstream of oracle': silent for more than 0.3 s" in error["message"]


async def test_a_connection_may_take_longer_than_the_upstream_may_be_silent(
    elsewhere: tuple[Elsewhere, int], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, port = elsewhere
    loop = asyncio.get_running_loop()
    known = loop.getaddrinfo

    async def slowly(host: Any, *given: Any, **more: Any) -> list[Any]:
        if host == "localhost":
            started_at = loop.time()
            await until(lambda: loop.time() > started_at + 0.6, "the name is known")
            host = "127.0.0.1"
        return await known(host, *given, **more)

    async def respond(_body: dict[str, Any]) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(loop, "getaddrinfo", slowly)
    there.respond = respond
    upstream = {"url": f"http://localhost:{port}/v1/", "timeout_s": 0.3}
    async with behind(tiny_model, tmp_path, port, upstream=upstream) as gateway:
        _, headers = await gateway.open("task")
        response = await gateway.chat(headers, model="oracle")
    assert (response.status_code, response.json()["error"]["code"]) == (504, "upstream_timeout")
    assert len(there.requests) == 1


async def _silent(there: Elsewhere) -> AsyncIterator[bytes]:
    async for part in there.forever(event("Guten") + b"\n\n" + event(" Tag")[:30]):
        yield part


async def _dying(_there: Elsewhere) -> AsyncIterator[bytes]:
    yield event("Guten") + b"\n\n" + event(" Tag")[:30]
    raise ConnectionError("the upstream dies here")


async def _ending(_there: Elsewhere) -> AsyncIterator[bytes]:
    yield event("Guten") + b"\n\n" + event(" Tag")[:30]


@pytest.mark.parametrize(
    ("how", "code", "given"),
    [
        (_silent, "upstream_timeout", {"timeout_s": 3.0}),
        (_dying, "upstream_unreachable", {}),
        (_ending, "upstream_broke_off", {}),
    ],
)
async def test_a_stream_that_breaks_off_never_ends_as_a_whole_one(
    elsewhere: tuple[Elsewhere, int],
    tiny_model: Path,
    tmp_path: Path,
    how: Callable[[Elsewhere], AsyncIterator[bytes]],
    code: str,
    given: dict[str, Any],
) -> None:
    there, port = elsewhere

    async def respond(_body: dict[str, Any]) -> Response:
        return events(how(there))

    there.respond = respond
    async with behind(tiny_model, tmp_path, port, upstream=given) as gateway:
        episode, headers = await gateway.open("task")
        async with streaming(gateway, headers) as response:
            data = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
        assert response.status_code == 200
        first, error = map(json.loads, data)
        assert first["choices"][0]["delta"] == {"content": "Guten"}
        assert error["error"]["code"] == code
        call, exchange = await call_of(gateway, episode)
        assert (call["finish_reason"], exchange["status"]) == ("error", 200)
        assert exchange["response"].encode().startswith(event("Guten"))


async def test_a_stream_without_done_is_complete_if_it_finished(
    relayed: tuple[RunningGateway, Elsewhere],
) -> None:
    gateway, there = relayed
    undone = EVENTS.removesuffix(b"data: [DONE]\n\n")

    async def respond(_body: dict[str, Any]) -> Response:
        return events([undone])

    there.respond = respond
    episode, headers = await gateway.open("task")
    async with streaming(gateway, headers) as response:
        data = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert [json.loads(line)["id"] for line in data] == ["x-1"] * 5
    assert (await call_of(gateway, episode))[0]["finish_reason"] == "upstream"


async def test_a_client_that_goes_away_leaves_what_it_had_and_the_upstream_stops(
    relayed: tuple[RunningGateway, Elsewhere],
) -> None:
    gateway, there = relayed
    first = event("Guten") + b"\n\n"

    async def respond(_body: dict[str, Any]) -> Response:
        return events(there.forever(first))

    there.respond = respond
    episode, headers = await gateway.open("task")
    async with streaming(gateway, headers) as response:
        lines = response.aiter_lines()
        while (line := await anext(lines)) in (": keep-alive", ""):  # the API may be slow
            pass
        assert line == event("Guten").decode()
    await until(lambda: there.gone == 1, "the upstream's stream is closed")

    async def recorded() -> bool:
        return bool((await gateway.admin.episode(episode))["calls"])

    await until(recorded, "the exchange is recorded")
    call, exchange = await call_of(gateway, episode)
    assert (call["finish_reason"], exchange["response"].encode()) == ("abandoned", first)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_an_episode_ends_its_calls_upstream(
    relayed: tuple[RunningGateway, Elsewhere], stream: bool
) -> None:
    gateway, there = relayed

    async def respond(_body: dict[str, Any]) -> Response:
        return events(there.forever(event("Guten") + b"\n\n"))

    there.respond = respond
    episode, headers = await gateway.open("task")
    if not stream:

        async def whole(_body: dict[str, Any]) -> Response:
            return StreamingResponse(there.forever(b"{"), media_type="application/json")

        there.respond = whole
    asking = asyncio.create_task(gateway.chat(headers, model="oracle", stream=stream), name="asking")
    (live,) = gateway.services.episodes._live.values()
    await until(lambda: any(call.parts for call in live.calls), "the response has begun")
    await gateway.admin.abandon(episode, "enough")
    response = await result_of(asking, "the call is answered")
    if stream:
        error = json.loads(response.text.strip().split("data: ")[-1])["error"]
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 409
        error = response.json()["error"]
    assert error["code"] == "episode_closed"
    await until(lambda: there.gone == 1, "the upstream's stream is closed")
    await until(lambda: not live.calls, "the episode has no call any more")


async def test_an_episode_whose_helper_thinks_is_not_idle(
    elsewhere: tuple[Elsewhere, int], tiny_model: Path, tmp_path: Path
) -> None:
    there, port = elsewhere
    responded = asyncio.Event()

    async def respond(body: dict[str, Any]) -> Response:
        await responded.wait()
        return await whole_or_streamed(body)

    there.respond = respond
    async with behind(tiny_model, tmp_path, port, episodes={"idle_s": 30}) as gateway:
        _, headers = await gateway.open("task")
        asking = asyncio.create_task(gateway.chat(headers, model="oracle"), name="asking")
        (live,) = gateway.services.episodes._live.values()
        await until(lambda: bool(there.requests), "the upstream has the request")
        live.last_used_at -= 60
        await gateway.services.episodes.sweep()
        responded.set()
        assert (await asking).status_code == 200
