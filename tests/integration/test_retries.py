"""Requests that are sent again, and clients that go away: one reply, sampled once and recorded once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api.v1.generation import WHOLE_INTERVAL
from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from tests.harness.agents import sdk
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.records import STOP_TOKENS, check_sampled_by_the_fake, nodes_of
from tests.harness.retries import RETRY, drop, lasting, send, stops, taken, turns_of
from tests.harness.scripted import TOOL_CALL, TOOLS, USER, ScriptedEngine, scripted_gateway
from tests.harness.waiting import result_of, until


async def check_one_turn(gateway: RunningGateway, episode: str, lost: int = 0) -> dict[str, Any]:
    """One turn, whole and right; the engine sampled each of its tokens once, and `lost` more, which had not left it yet when it
    was stopped."""
    nodes = await nodes_of(gateway, episode)
    (turn,) = [node for node in nodes if node["sampled"]]
    assert turn["mask_reason"] == ""
    assert turn["ids"][-1] == STOP_TOKENS[0]
    check_sampled_by_the_fake(nodes, turn, {0: gateway.settings.model.path.resolve()})
    assert gateway.engine.sampled - len(turn["ids"]) == lost
    return turn


def content_of(response: httpx.Response) -> dict[str, Any]:
    """Return the text of a streamed or whole response, however it was cut into chunks."""
    assert response.status_code == 200, response.text
    if "event-stream" not in response.headers["content-type"]:
        return response.json()
    *events, done = [json.loads(e[6:]) if "[DONE]" not in e else "" for e in response.text.split("\n\n") if e]
    assert done == "", "the stream ended as it should"
    joined: dict[str, Any] = {"id": {event["id"] for event in events}, "usage": events[-1].get("usage")}
    for choice in (choice for event in events for choice in event["choices"]):
        for name, value in [*choice["delta"].items(), ("finish", choice["finish_reason"])]:
            if value is not None:
                joined[name] = joined[name] + value if name in joined else value
        joined.setdefault("logprobs", []).extend((choice["logprobs"] or {"content": []})["content"])
    return joined


@asynccontextmanager
async def cutting_proxy(gateway: RunningGateway) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Event]]:
    """A TCP proxy before the gateway. The first connection breaks when the first event is set; others wait for the second."""
    cut, again, connections = asyncio.Event(), asyncio.Event(), 0

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        ends = [cut.wait()] if connections == 1 else []
        if not ends:
            await again.wait()
        there, back = await asyncio.open_connection("127.0.0.1", gateway.settings.server.port)
        tasks = [asyncio.ensure_future(work) for work in (pipe(reader, back), pipe(there, writer), *ends)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            writer.transport.abort()
            back.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", cut, again
    finally:
        server.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_sdk_sends_again_after_a_broken_connection_is_one_call(
    gateway: RunningGateway, stream: bool
) -> None:
    """The SDK sends a stream again only if the connection breaks before its first event."""
    begun = 0 if stream else 20
    await hold_after(gateway, begun)
    opened = await gateway.admin.open_episode("task")
    body = {**lasting(gateway), "stream": stream}
    async with (
        cutting_proxy(gateway) as (url, cut, again),
        sdk(opened, max_retries=2).with_options(base_url=url) as client,
    ):
        call = asyncio.create_task(client.chat.completions.create(**body), name="sdk")
        await arrived(gateway, 1)
        await taken(gateway, begun - begun % WHOLE_INTERVAL)
        cut.set()
        await stops(gateway)
        await release(gateway)
        again.set()
        response = await call
        if stream:
            chunks = [chunk async for chunk in response]
            text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
        else:
            text = response.choices[0].message.content
    turn = await check_one_turn(gateway, opened.episode_id, lost=begun % WHOLE_INTERVAL)
    assert text == gateway.model.renderer.decode(turn["ids"][:-1])


async def test_a_stream_that_breaks_is_resumed_by_an_equal_request(gateway: RunningGateway) -> None:
    """The SDK does not retry it, so the agent asks again, as if for the first time."""
    await hold_after(gateway, 30)
    episode, headers = await gateway.open("task")
    body = {**lasting(gateway), "stream": True, "logprobs": True}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        lines = response.aiter_lines()
        received = [line for _ in range(20) if (line := await anext(lines))]
        await arrived(gateway, 1)
        await taken(gateway, 30)
    await stops(gateway)
    assert gateway.engine.sampled == 30
    assert await turns_of(gateway, episode) == [], "it can still be resumed"
    await release(gateway)
    again = await send(gateway, headers, body)
    assert again.text.split("\n\n")[: len(received)] == received, "the same events, from the first on"
    turn = await check_one_turn(gateway, episode)
    entries = content_of(again)["logprobs"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(turn["logprobs"])


async def test_a_retry_joins_the_call_in_flight(gateway: RunningGateway) -> None:
    await hold_after(gateway, 10)
    episode, headers = await gateway.open("task")
    body = {**lasting(gateway), "stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    first = asyncio.create_task(send(gateway, headers, body), name="first")
    await arrived(gateway, 1)
    retry = asyncio.create_task(send(gateway, headers, body, **RETRY), name="retry")
    await read_by(gateway, 2)
    await release(gateway)
    assert content_of(await retry) == content_of(await first)
    await check_one_turn(gateway, episode)


async def read_by(gateway: RunningGateway, clients: int) -> None:
    """Wait until this number of clients read the reply of the only call."""
    (completion,) = [call for live in gateway.services.episodes._live.values() for call in live.calls]
    await until(lambda: len(completion.reply.readers) == clients, f"{clients} clients read the reply")


async def test_a_joined_call_goes_on_when_the_first_client_leaves(gateway: RunningGateway) -> None:
    await hold_after(gateway, 5)
    episode, headers = await gateway.open("task")
    body = lasting(gateway)
    first = asyncio.create_task(send(gateway, headers, body), name="first")
    await arrived(gateway, 1)
    retry = asyncio.create_task(send(gateway, headers, body, **RETRY), name="retry")
    await read_by(gateway, 2)
    first.cancel()
    await read_by(gateway, 1)
    assert gateway.engine.held == 1
    await release(gateway)
    assert (await retry).status_code == 200
    await check_one_turn(gateway, episode)


async def test_equal_requests_are_two_samples(gateway: RunningGateway) -> None:
    await hold_after(gateway, 1)
    episode, headers = await gateway.open("task")
    body = lasting(gateway)
    together = asyncio.gather(*(send(gateway, headers, body) for _ in range(3)))
    await arrived(gateway, 3)
    await release(gateway)
    later = await send(gateway, headers, body, **{"x-stainless-retry-count": "none"})
    ids = {response.json()["id"] for response in [*await together, later]}
    assert len(ids) == len(await turns_of(gateway, episode)) == 4


async def test_only_one_of_two_equal_requests_takes_the_place_of_the_client_that_left(
    gateway: RunningGateway,
) -> None:
    episode, headers = await gateway.open("task")
    body = lasting(gateway)
    await drop(gateway, headers, body, 20)
    await hold_after(gateway, 1)
    responding = asyncio.gather(*(send(gateway, headers, body) for _ in range(2)))
    await arrived(gateway, 2)
    await release(gateway)
    responses = await responding
    assert len({response.json()["id"] for response in responses}) == 2
    assert [turn["mask_reason"] for turn in await turns_of(gateway, episode)] == ["", ""]


async def test_requests_with_the_same_idempotency_key_are_one_call(gateway: RunningGateway) -> None:
    await hold_after(gateway, 1)
    episode, headers = await gateway.open("task")
    other, other_headers = await gateway.open("task")
    body, key = lasting(gateway), {"Idempotency-Key": "k1"}
    sending = asyncio.gather(*(send(gateway, headers, body, **key) for _ in range(5)))
    await arrived(gateway, 1)
    await read_by(gateway, 5)
    await release(gateway)
    together = await sending
    later = await send(gateway, headers, body, **key)
    assert all(response.json() == later.json() for response in together)
    await check_one_turn(gateway, episode)
    elsewhere = await send(gateway, other_headers, body, **key)
    another = await send(gateway, headers, body, **{"Idempotency-Key": "k2"})
    assert len({response.json()["id"] for response in (later, elsewhere, another)}) == 3
    assert len(await turns_of(gateway, episode)) == 2
    assert len(await turns_of(gateway, other)) == 1


async def test_an_idempotency_key_is_for_one_body(gateway: RunningGateway) -> None:
    await hold_after(gateway, 5)
    episode, headers = await gateway.open("task")
    body, key = lasting(gateway), {"Idempotency-Key": "k1"}
    first = asyncio.create_task(send(gateway, headers, body, **key), name="first")
    await arrived(gateway, 1)
    while_it_runs = await send(gateway, headers, {**body, "temperature": 0.5}, **key)
    assert not first.done()
    await release(gateway)
    assert (await first).status_code == 200
    after_its_end = await send(gateway, headers, {**body, "temperature": 0.5}, **key)
    for refused in (while_it_runs, after_its_end):
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "idempotency_key_reused")
    await check_one_turn(gateway, episode)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_record_serves_a_retry_after_the_end_and_after_a_restart(
    tiny_model: Path, tmp_path: Path, stream: bool
) -> None:
    engine, port = ScriptedEngine(), free_port()
    external = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
    values = settings_for(tiny_model, tmp_path, engine=external)
    body: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS, "logprobs": True}
    body |= {"stop": "never", "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with serve(create_fake_app(engine), port):
        async with run_gateway(values, in_process=False) as gateway:
            backend = gateway.model.renderer.backend
            engine.encode = lambda text: backend.encode(text, add_special_tokens=False).ids
            engine.replies.append(f"<think>\nhm\n</think>\n\nlet me see\n{TOOL_CALL}{TOOL_CALL}")
            episode, headers = await gateway.open("task")
            first = content_of(await send(gateway, headers, body))
            assert content_of(await send(gateway, headers, body, **RETRY)) == first
        async with run_gateway(values, in_process=False) as gateway:
            assert content_of(await send(gateway, headers, body, **RETRY)) == first
            assert len(await turns_of(gateway, episode)) == len(engine.requests) == 1
    message = first if stream else first["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "let me see"
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert first["usage"]["completion_tokens"] > 20


async def test_a_stop_string_ends_the_recorded_reply_where_it_ended_the_first(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with scripted_gateway(tiny_model, tmp_path) as (gateway, engine):
        engine.replies.append("one two three")
        _, headers = await gateway.open("task")
        body = {"model": "m", "messages": [USER], "stop": [" two"], "logprobs": True}
        first = content_of(await send(gateway, headers, body))
        assert first["choices"][0]["message"]["content"] == "one"
        assert content_of(await send(gateway, headers, body, **RETRY)) == first


async def test_a_finished_reply_is_kept_for_a_client_that_could_not_have_it(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks while the turn is being committed."""
    generated, commit, record = asyncio.Event(), asyncio.Event(), gateway.model.recorder.record

    async def slow(*args: Any) -> None:
        generated.set()
        await commit.wait()
        await record(*args)

    monkeypatch.setattr(gateway.model.recorder, "record", slow)
    episode, headers = await gateway.open("task")
    (live,) = gateway.services.episodes._live.values()
    body = lasting(gateway)
    call = asyncio.create_task(send(gateway, headers, body), name="dropped")
    await result_of(generated.wait(), "it has generated")
    (completion,) = live.calls
    call.cancel()
    await until(lambda: completion.reply.orphaned, "the client has left")
    commit.set()
    await until(lambda: completion.reply.ended, "the turn is committed")
    again = await send(gateway, headers, body)
    await until(lambda: not live.calls, "it is kept no longer")
    turn = await check_one_turn(gateway, episode)
    assert again.json()["id"] == turn["call_id"]
    assert (await send(gateway, headers, body)).json()["id"] != turn["call_id"]


async def test_after_the_grace_period_the_tokens_are_an_abandoned_branch(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path, calls={"grace_s": 0.3})) as gateway:
        episode, headers = await gateway.open("task")
        body = lasting(gateway)
        await drop(gateway, headers, body, 20)

        async def abandoned() -> bool:
            return [turn["mask_reason"] for turn in await turns_of(gateway, episode)] == ["abandoned"]

        await until(abandoned, "the branch is recorded")
        assert (await send(gateway, headers, body, **RETRY)).status_code == 200
        nodes = await nodes_of(gateway, episode)
        left, whole = [node for node in nodes if node["sampled"]]
        assert (left["mask_reason"], whole["mask_reason"]) == ("abandoned", "")
        assert left["ids"] == whole["ids"][:WHOLE_INTERVAL]
        check_sampled_by_the_fake(nodes, whole, {0: tiny_model.resolve()})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_sampled_nothing_leaves_nothing_and_can_be_joined(
    gateway: RunningGateway, stream: bool
) -> None:
    episode, headers = await gateway.open("task")
    body = {**lasting(gateway), "stream": stream}
    await drop(gateway, headers, body, 0)
    assert await nodes_of(gateway, episode) == []
    assert (await send(gateway, headers, body)).status_code == 200
    await check_one_turn(gateway, episode)


async def test_a_seeded_call_is_not_resumed_but_sampled_again(gateway: RunningGateway) -> None:
    """The state of its sampler is lost with its run."""
    episode, headers = await gateway.open("task")
    body = lasting(gateway, seed=3)
    await drop(gateway, headers, body, 20)
    assert (await send(gateway, headers, body, **RETRY)).status_code == 200

    async def recorded() -> bool:
        return len(await turns_of(gateway, episode)) == 2

    await until(recorded, "what is left of it is recorded too")
    nodes = await nodes_of(gateway, episode)
    whole, left = sorted([n for n in nodes if n["sampled"]], key=lambda node: node["mask_reason"])
    assert (left["mask_reason"], whole["mask_reason"]) == ("abandoned", "")
    for turn in (left, whole):
        check_sampled_by_the_fake(nodes, turn, {0: gateway.settings.model.path.resolve()}, seed=3)


async def test_an_episode_that_closes_takes_the_calls_with_it_that_could_be_resumed(
    gateway: RunningGateway,
) -> None:
    episode, headers = await gateway.open("task")
    body = lasting(gateway)
    await drop(gateway, headers, body, 20)
    await gateway.admin.reward(episode, 1.0)
    (turn,) = await turns_of(gateway, episode)
    assert turn["mask_reason"] == "abandoned"
    refused = await send(gateway, headers, body, **RETRY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "episode_closed")
    assert not gateway.services.replies._completions


async def test_an_episode_that_closes_while_a_prompt_is_made_starts_no_call(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode, headers = await gateway.open("task")
    prepare = gateway.model.recorder.prepare

    async def late(*args: Any) -> Any:
        await gateway.admin.reward(episode, 1.0)
        return await prepare(*args)

    monkeypatch.setattr(gateway.model.recorder, "prepare", late)
    refused = await send(gateway, headers, lasting(gateway))
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "episode_closed")
    assert gateway.engine.sampled == 0
    assert not gateway.model.recorder._trees, "its token tree is not held for ever"


async def test_a_gateway_that_stops_records_what_could_be_resumed(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(tiny_model, tmp_path)
    async with run_gateway(values) as gateway:
        episode, headers = await gateway.open("task")
        body = lasting(gateway)
        await drop(gateway, headers, body, 20)
        assert await turns_of(gateway, episode) == []
    async with run_gateway(values) as gateway:
        (turn,) = await turns_of(gateway, episode)
        assert turn["mask_reason"] == "abandoned"
        assert len(turn["ids"]) == WHOLE_INTERVAL
        assert (await send(gateway, headers, body, **RETRY)).status_code == 200
        assert len(await turns_of(gateway, episode)) == 2


async def test_metrics_count_a_call_once_however_many_read_it(gateway: RunningGateway) -> None:
    await hold_after(gateway, 1)
    _, headers = await gateway.open("task")
    body, key = lasting(gateway), {"Idempotency-Key": "k1"}
    sent = asyncio.gather(*(send(gateway, headers, body, **key) for _ in range(3)))
    await arrived(gateway, 1)
    await read_by(gateway, 3)
    await release(gateway)
    await sent
    lines = (await gateway.http.get("/metrics")).text.splitlines()
    (calls,) = [line for line in lines if line.startswith("headgate_calls_total{")]
    (tokens,) = [line for line in lines if line.startswith("headgate_sampled_tokens_total ")]
    assert calls.endswith(" 1.0")
    assert float(tokens.split()[-1]) == gateway.engine.sampled
