"""The mock engine speaks vLLM's API as the gateway reads it, and Anthropic's; it sends the replies of `bench.replies`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from bench.engine import EngineSettings, serve
from bench.load import RequestFailed, events_of
from bench.model import END
from bench.replies import ARGUMENTS, LOGPROB, TOOL, TOOL_TOKENS, plain, with_tool
from bench.targets import ChatKind, ChatTarget, MessagesTarget, Prompts
from gateway.engines.base import GenerateRequest, TokenChunk
from gateway.engines.vllm import VLLMEngine
from headgate.processes.ports import free_port
from headgate.types import Sampling
from tests.harness.waiting import LONG_S

PROMPTS = Prompts(["hi"], [[1, 2]], [END])


@asynccontextmanager
async def mock(settings: EngineSettings) -> AsyncIterator[tuple[VLLMEngine, httpx.AsyncClient]]:
    port, listening = free_port(), asyncio.Event()
    server = asyncio.create_task(serve(port, settings, listening.set), name="mock")
    await listening.wait()
    engine = VLLMEngine("mock", f"http://127.0.0.1:{port}")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as http:
        yield engine, http
    await engine.close()
    server.cancel()
    await asyncio.wait({server})


async def generated(engine: VLLMEngine, name: str, max_tokens: int, interval: int = 1) -> list[TokenChunk]:
    request = GenerateRequest(name, [1, 2, 3], Sampling(max_tokens=max_tokens), interval)
    return [chunk async for chunk in engine.generate(request)]


async def test_a_generation_is_the_reply_and_its_label() -> None:
    async with mock(EngineSettings(chunk_ms=0.1)) as (engine, _):
        assert await engine.healthy()
        await engine.label(7)
        await engine.load("anywhere")
        chunks = await generated(engine, "a", 10)
        assert [chunk.ids for chunk in chunks] == [[token] for token in plain(10, False).ids]
        assert all(chunk.logprobs == [LOGPROB] for chunk in chunks)
        assert [chunk.finish for chunk in chunks] == [None] * 9 + ["length"]
        assert chunks[-1].labels == (("7", 10),)
        assert [len(chunk.ids) for chunk in await generated(engine, "b", 10, 4)] == [4, 4, 2]
        (ended,) = await generated(engine, "c", 100, 100)
        assert (ended.finish, ended.ids[-1], len(ended.ids)) == ("stop", END, 64)
        assert await engine.score([5, 6, 7]) == [LOGPROB, LOGPROB]


async def test_a_pause_gives_requests_back_or_freezes_them() -> None:
    async with mock(EngineSettings(chunk_ms=20.0, chunks=10_000)) as (engine, _):
        first = asyncio.Event()

        async def run(name: str, max_tokens: int) -> list[TokenChunk]:
            chunks = []
            request = GenerateRequest(name, [1], Sampling(max_tokens=max_tokens))
            async for chunk in engine.generate(request):
                chunks.append(chunk)
                first.set()
            return chunks

        task = asyncio.create_task(run("aborted", 10_000))
        await first.wait()
        await engine.pause()
        chunks = await task
        count = sum(len(chunk.ids) for chunk in chunks)
        assert (chunks[-1].finish, chunks[-1].labels) == ("abort", (("default", count),))
        await engine.resume()
        first.clear()
        task = asyncio.create_task(run("frozen", 5))
        await first.wait()
        await engine.pause(keep=True)
        await engine.resume()
        assert [token for chunk in await task for token in chunk.ids] == plain(5, False).ids


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("form", [ChatTarget, MessagesTarget])
async def test_a_response_is_the_reply_whole_and_streamed(form: type[ChatTarget], tools: bool) -> None:
    settings = EngineSettings(chunk_ms=0.1, tools=tools)
    target = form("mock", 1, PROMPTS, kind=ChatKind(tools, reply=settings.reply))
    tokens = TOOL_TOKENS if tools else 12
    async with mock(settings) as (_, http):
        for streamed in (False, True):
            head, _, body = target.request(0, tokens, streamed).partition(b"\r\n\r\n")
            path = head.split()[1].decode()
            assert path == ("/v1/messages" if form is MessagesTarget else "/v1/chat/completions")
            response = (await http.post(path, content=body)).content
            events = events_of(response) if streamed else [response]
            chunks, counted = target.count(events, streamed)
            assert counted == tokens
            expected = sum(1 for delta in settings.reply(tokens).deltas if delta and any(delta.values()))
            expected -= tools and form is MessagesTarget  # there the name of a call is not a delta
            assert chunks == (expected if streamed else 1)
            values = [orjson.loads(event) for event in events if event != b"[DONE]"]
            choices = [
                choice for value in values for choice in value.get("choices", ()) if choice.get("token_ids")
            ]
            assert all(len(c["logprobs"]["content"]) == len(c["token_ids"]) for c in choices)


def blocks_of(message: Message) -> list[tuple[str, Any]]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


@pytest.mark.parametrize("tools", [False, True])
async def test_anthropics_client_reads_the_reply_whole_and_streamed(tools: bool) -> None:
    settings = EngineSettings(chunk_ms=0.1, tools=tools)
    tokens = TOOL_TOKENS if tools else 12
    reply = settings.reply(tokens)
    texts = [("thinking", reply.joined("reasoning_content")), ("text", reply.joined("content"))]
    expected = (
        [*texts, ("tool_use", orjson.loads(ARGUMENTS))] if tools else [("text", reply.joined("content"))]
    )
    async with mock(settings) as (_, http):
        client = AsyncAnthropic(base_url=str(http.base_url), api_key="none", max_retries=0, timeout=LONG_S)
        request = {"model": "bench", "max_tokens": tokens, "messages": [{"role": "user", "content": "hi"}]}
        whole = await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            deltas = [event.delta async for event in stream if event.type == "content_block_delta"]
            streamed = await stream.get_final_message()
        await client.close()
    for message in (whole, streamed):
        assert blocks_of(message) == expected
        assert message.stop_reason == ("tool_use" if tools else "max_tokens")
        assert message.usage.output_tokens == tokens
    fields = ("thinking", "text", "partial_json")
    parts = [next(getattr(delta, name) for name in fields if hasattr(delta, name)) for delta in deltas]
    assert max(map(len, parts)) <= 2, "a token in a chunk"


async def test_settings_change_for_what_comes_next() -> None:
    async with mock(EngineSettings(chunk_ms=0.1)) as (engine, http):
        (await http.post("/bench/settings", json={"tools": True})).raise_for_status()
        chunks = await generated(engine, "a", TOOL_TOKENS, 16)
        assert [token for chunk in chunks for token in chunk.ids] == with_tool(TOOL_TOKENS).ids
        assert (await http.post("/bench/settings", json={"speed": 1})).status_code == 400
        assert (await http.get("/nowhere")).status_code == 404


def test_a_reply_with_a_tool_call_has_its_parts() -> None:
    reply = with_tool(TOOL_TOKENS)
    assert len(reply.ids) == len(reply.texts) == len(reply.deltas) == TOOL_TOKENS
    function = reply.message()["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == (TOOL, ARGUMENTS)
    assert reply.joined("reasoning_content") in "".join(reply.texts)
    with pytest.raises(ValueError, match="tokens"):
        with_tool(10)


def chat(*deltas: dict[str, Any], tokens: int) -> list[bytes]:
    events = [orjson.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    return [*events, orjson.dumps({"choices": [], "usage": {"completion_tokens": tokens}}), b"[DONE]"]


def test_a_response_that_lost_a_word_is_a_failure() -> None:
    target = ChatTarget("any", 1, PROMPTS, kind=ChatKind(reply=EngineSettings().reply))
    text = plain(6, False).joined("content")
    halves = {"content": text[:4]}, {"content": text[4:]}
    assert target.count(chat(*halves, tokens=6), True) == (2, 6)
    for wrong in (chat(halves[0], tokens=6), chat(*halves, tokens=7), chat(halves[1], halves[0], tokens=6)):
        with pytest.raises(RequestFailed, match="content"):
            target.count(wrong, True)


def message(*deltas: dict[str, Any], tokens: int) -> list[bytes]:
    events = [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas]
    end = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": tokens}}
    return [orjson.dumps(event) for event in (*events, end, {"type": "message_stop"})]


def test_a_message_that_lost_a_word_or_its_end_is_a_failure() -> None:
    target = MessagesTarget("any", 1, PROMPTS, kind=ChatKind(reply=EngineSettings().reply))
    text = plain(6, False).joined("content")
    halves = [{"type": "text_delta", "text": half} for half in (text[:4], text[4:])]
    signature = {"type": "signature_delta", "signature": "any"}
    assert target.count(message(*halves, signature, tokens=6), True) == (2, 6)
    for wrong in (message(halves[0], tokens=6), message(*halves, tokens=7), message(*halves[::-1], tokens=6)):
        with pytest.raises(RequestFailed, match="content"):
            target.count(wrong, True)
    for part in (message(*halves, tokens=6)[:-1], message(*halves, tokens=6)[:2], []):
        with pytest.raises(RequestFailed, match="early"):
            target.count(part, True)
    with pytest.raises(RequestFailed, match="gone"):
        target.count([orjson.dumps({"type": "error", "error": {"message": "gone"}})], True)


def test_the_head_of_a_message_is_no_beginning() -> None:
    target = MessagesTarget("any", 1, PROMPTS)
    head = b'data: {"type":"content_block_start","content_block":{"type":"text","text":""}}'
    assert not target.begins(head, True)
    assert target.begins(head + b'data: {"delta":{"type":"text_delta","text": "a"}}', True)
    assert target.begins(b'data: {"delta":{"type":"thinking_delta","thinking":"a"}}', True)


def test_the_role_alone_is_no_beginning() -> None:
    target = ChatTarget("any", 1, PROMPTS)
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"logprobs":{"content":[]}}]}'
    assert not target.begins(role, True)
    assert target.begins(role + b'data: {"choices":[{"delta":{"content": "a"}}]}', True)
    assert target.begins(b'data: {"delta":{"reasoning_content":"a"}}', True)
    assert target.begins(b"{", False)
