"""Upstream models: relayed as they are, and recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from headgate.client.admin import GatewayRefused
from tests.harness.agents import sdk
from tests.harness.gateways import RunningGateway
from tests.harness.scripted import USER
from tests.harness.upstream import EVENTS, WHOLE, WORDS, Elsewhere, behind, call_of, event, events, streaming


async def test_a_whole_response_is_the_upstreams_own_and_recorded(
    relayed: tuple[RunningGateway, Elsewhere],
) -> None:
    gateway, there = relayed
    episode, headers = await gateway.open("task")
    body = {"n": 2, "response_format": {"type": "json_object"}, "unheard_of": [1, {"deep": None}]}
    response = await gateway.chat({**headers, "x-of-the-agent": "1"}, model="gpt-4o", **body)
    assert (response.status_code, response.json()) == (200, WHOLE)
    assert response.headers["x-headgate-episode"] == episode
    ((sent, body_sent),) = there.requests
    assert body_sent == {"model": "big-one", "messages": [USER], **body}
    assert sent["authorization"] == "Bearer sk-of-the-admin"
    assert "x-of-the-agent" not in sent
    assert headers["Authorization"] not in sent.values()
    call, exchange = await call_of(gateway, episode)
    shown = [call[name] for name in ("model", "engine", "finish_reason", "node")]
    assert shown == ["oracle", "upstream", "upstream", -1]
    assert 0 <= call["first_token_s"] <= call["seconds"]
    assert (exchange["status"], json.loads(exchange["response"])) == (200, WHOLE)
    assert exchange["request"] == {"model": "gpt-4o", "messages": [USER], **body}


async def test_an_image_is_sent_on_as_it_came_and_recorded(relayed: tuple[RunningGateway, Elsewhere]) -> None:
    """Engines of this gateway are given none, so an agent that has to look at something needs a model that is upstream."""
    gateway, there = relayed
    episode, headers = await gateway.open("task")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    refused = await gateway.chat(headers, messages=messages)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content.1")
    assert (await gateway.chat(headers, model="oracle", messages=messages)).status_code == 200
    assert [given["messages"] for _, given in there.requests] == [messages]
    _, exchange = await call_of(gateway, episode)
    assert exchange["request"]["messages"] == messages


async def test_without_a_key_or_another_name_none_is_sent(
    elsewhere: tuple[Elsewhere, int], tiny_model: Path, tmp_path: Path
) -> None:
    there, port = elsewhere
    async with behind(tiny_model, tmp_path, port, upstream={"key": None, "model": None}) as gateway:
        _, headers = await gateway.open("task")
        assert (await gateway.chat(headers, model="gpt-4o")).status_code == 200
    ((sent, body_sent),) = there.requests
    assert "authorization" not in sent
    assert body_sent["model"] == "oracle"


async def test_nothing_of_it_is_fed_and_only_its_episode_reads_it(
    elsewhere: tuple[Elsewhere, int], tiny_model: Path, tmp_path: Path
) -> None:
    staleness = {"batch": 1, "min_members": 1}
    async with behind(tiny_model, tmp_path, elsewhere[1], staleness=staleness) as gateway:
        episode, headers = await gateway.open("task")
        for model in ("oracle", "demo"):
            assert (await gateway.chat(headers, model=model, max_tokens=4)).status_code == 200
        await gateway.admin.reward(episode, 1.0)
        leased = await gateway.admin.leased_groups(await gateway.admin.lease("trainer"))
        assert len([node for node in leased.groups[0].episodes[0].nodes if node.sampled]) == 1
        calls = (await gateway.admin.episode(episode))["calls"]
        assert [call["model"] for call in calls] == ["oracle", "demo"]
        for owner, call in ((episode, calls[1]["id"]), ("ep-other", calls[0]["id"])):
            with pytest.raises(GatewayRefused) as refused:
                await gateway.admin.exchange(owner, call)
            assert (refused.value.status, refused.value.code) == (404, "no_exchange")
        with pytest.raises(GatewayRefused) as refused:
            await gateway.admin.publish(1, "v1", model="oracle")
        assert refused.value.status == 404
        assert [m["id"] for m in (await gateway.http.get("/v1/models")).json()["data"]] == [
            "demo",
            "oracle",
            "gpt-4o",
        ]


async def test_a_stream_is_the_upstreams_own_and_recorded(relayed: tuple[RunningGateway, Elsewhere]) -> None:
    gateway, _ = relayed
    opened = await gateway.admin.open_episode("task")
    async with sdk(opened) as client:
        stream = await client.chat.completions.create(model="oracle", messages=[USER], stream=True)  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks] == [*WORDS, None]
    assert {chunk.id for chunk in chunks} == {"x-1"}
    call, exchange = await call_of(gateway, opened.episode_id)
    assert (call["stream"], call["finish_reason"], call["engine"]) == (True, "upstream", "upstream")
    assert [call[name] for name in ("prompt_tokens", "completion_tokens", "pauses")] == [0, 0, 0]
    assert (exchange["status"], exchange["response"].encode()) == (200, EVENTS)


async def test_the_end_of_a_stream_leaves_after_the_commit(
    relayed: tuple[RunningGateway, Elsewhere], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, _ = relayed
    upstream, commit = gateway.services.models.upstream["oracle"], asyncio.Event()
    record = type(upstream).record

    async def late(self: Any, call: Any) -> None:
        await commit.wait()
        await record(self, call)

    monkeypatch.setattr(type(upstream), "record", late)
    episode, headers = await gateway.open("task")
    async with streaming(gateway, headers) as response:
        lines = response.aiter_lines()
        seen: list[str] = []
        while event(None).decode() not in seen:
            seen.append(await anext(lines))
        while ": keep-alive" not in seen[-1:]:  # it waits, and is not silent
            seen.append(await anext(lines))
        assert "data: [DONE]" not in seen
        commit.set()
        while "data: [DONE]" not in seen:
            seen.append(await anext(lines))
        _, exchange = await call_of(gateway, episode)
        assert exchange["response"].encode() == EVENTS


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_keep_alives_come_between_events_and_never_into_one(
    relayed: tuple[RunningGateway, Elsewhere], end: bytes
) -> None:
    gateway, there = relayed
    more = asyncio.Event()
    whole = EVENTS.replace(b"\n\n", end)

    async def in_pieces() -> AsyncIterator[bytes]:
        middle = len(whole) // 2
        for part in (whole[:20], whole[20:middle], whole[middle:]):
            yield part
            await more.wait()

    async def respond(_body: dict[str, Any]) -> Response:
        return events(in_pieces())

    there.respond = respond
    _, headers = await gateway.open("task")
    async with streaming(gateway, headers) as response:
        lines = response.aiter_lines()
        kept = 0
        while kept < 3:
            kept += await anext(lines) == ": keep-alive"
        more.set()
        data = [line async for line in lines if line.startswith("data: ")]
    words = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in data[:-1]]
    assert (words, data[-1]) == ([*WORDS, None], "data: [DONE]")
