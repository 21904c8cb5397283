"""Anthropic's API as its own SDK uses it: replies, streams, tools over several turns, thinking, errors, retries."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio

from gateway.engines.fake import Faults
from tests.harness.gateways import RunningGateway
from tests.harness.records import nodes_of, path_to
from tests.harness.scripted import ScriptedEngine, scripted_gateway
from tests.harness.waiting import LONG_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: dict[str, Any] = {"role": "user", "content": "hi"}
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
THINKING: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
async def shared(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RunningGateway, ScriptedEngine]]:
    models = {"demo": {"path": str(tiny_model), "aliases": ["claude-opus"]}}
    elsewhere = {"train": False, "upstream": {"url": "http://127.0.0.1:9/v1"}}
    work = tmp_path_factory.mktemp("messages")
    async with scripted_gateway(
        tiny_model,
        work,
        models={**models, "elsewhere": elsewhere},
        staleness={"batch": 64},
        server={"keep_alive_s": 0.05},
    ) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def scripted(
    shared: tuple[RunningGateway, ScriptedEngine],
) -> AsyncIterator[tuple[RunningGateway, ScriptedEngine]]:
    """The module's gateway; a test must use all of its scripted replies."""
    yield shared
    left, engine = list(shared[1].replies), shared[1]
    engine.replies.clear()
    assert left == []


@asynccontextmanager
async def opened(
    gateway: RunningGateway, **kwargs: Any
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, str]]:
    """The SDK in a new episode, and the episode's id."""
    episode = await gateway.admin.open_episode("task", mode="eval", **kwargs)
    async with anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key=episode.api_key, max_retries=0, timeout=LONG_S
    ) as client:
        yield client, episode.episode_id


async def ask(client: Any, *messages: Any, stream: bool = False, **values: Any) -> Any:
    body = {"model": "claude-opus", "max_tokens": 1500, "messages": [*messages], **values}
    if not stream:
        return await client.messages.create(**body)
    async with client.messages.stream(**body) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply(scripted: tuple[RunningGateway, ScriptedEngine], stream: bool) -> None:
    gateway, engine = scripted
    engine.replies.append("Grüße 🙂")
    async with opened(gateway) as (client, episode):
        response = await ask(client, HI, system="be kind", stream=stream)
    assert [(block.type, block.text) for block in response.content] == [("text", "Grüße 🙂")]
    assert (response.stop_reason, response.stop_sequence, response.role) == ("end_turn", None, "assistant")
    assert response.model == "claude-opus"
    prompt, turn = await nodes_of(gateway, episode)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        len(prompt["ids"]),
        len(turn["ids"]),
    )
    assert response.id == turn["call_id"]
    assert gateway.model.renderer.decode(prompt["ids"]).startswith("<|im_start|>system\nbe kind<|im_end|>")


@pytest.mark.parametrize(
    ("stream", "thinking"),
    [(False, None), (True, THINKING), (True, {"type": "adaptive", "display": "omitted"})],
)
async def test_a_conversation_of_tools_is_one_path_of_tokens(
    scripted: tuple[RunningGateway, ScriptedEngine], stream: bool, thinking: dict[str, Any] | None
) -> None:
    """The client sends back what the SDK gave it, and changes its requests between turns as Claude Code does."""
    gateway, engine = scripted
    values: dict[str, Any] = {
        "tools": [ADD],
        "stream": stream,
        **({"thinking": thinking} if thinking else {}),
    }
    engine.replies += [
        "<think>\nadd\n</think>\n\nLet me." + CALL % 1 + "\n" + CALL % 2,
        CALL % 3,
        "<think>\nit is six\n</think>\n\nSix.",
    ]
    messages: list[Any] = [HI]
    async with opened(gateway) as (client, episode):
        for turn in range(3):
            bill = {"type": "text", "text": f"x-anthropic-billing-header: cch={turn};"}
            system = [bill, {"type": "text", "text": "add", "cache_control": {"type": "ephemeral"}}]
            response = await ask(client, *messages, system=system, **values)
            messages.append({"role": "assistant", "content": response.content})
            uses = [block for block in response.content if block.type == "tool_use"]
            if uses:
                assert response.stop_reason == "tool_use"
                results = [
                    {"type": "tool_result", "tool_use_id": use.id, "content": str(use.input["a"])}
                    for use in uses
                ]
                messages.append({"role": "user", "content": results})
    nodes = await nodes_of(gateway, episode)
    assert [node["sampled"] for node in nodes] == [False, True] * 3
    for before, node in itertools.pairwise(nodes):
        assert (node["parent"], node["at"]) == (before["index"], len(before["ids"]))
    given = [request["token_ids"] for request in engine.requests[-3:]]
    assert given == [path_to(nodes, node) for node in nodes if node["sampled"]]
    first, last = messages[1]["content"], messages[-1]["content"]
    kinds = ["text", "tool_use", "tool_use"]
    assert [block.type for block in first] == (["thinking", *kinds] if thinking else kinds)
    assert [block.input for block in first[-2:]] == [{"a": 1}, {"a": 2}]
    assert last[-1].text == "Six."
    if thinking:
        assert (last[0].thinking, bool(last[0].signature)) == (
            "it is six" if "budget_tokens" in thinking else "",
            True,
        )


async def test_the_sdks_tool_runner(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    """The runner first asks the server to keep the conversation, and goes on by itself once it is refused."""
    gateway, engine = scripted
    engine.replies += [CALL % 2, "Done."]

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Adds."""
        return str(a + 1)

    async with opened(gateway) as (client, episode):
        runner: Any = client.beta.messages.tool_runner(
            model="claude-opus", max_tokens=500, messages=[HI], tools=[add], stream=True
        )
        last = await runner.until_done()
    assert [block.text for block in last.content] == ["Done."]
    prompt, call, result, _done = await nodes_of(gateway, episode)
    assert [call["parent"], result["parent"]] == [prompt["index"], call["index"]]
    assert "<tool_response>\n3\n</tool_response>" in gateway.model.renderer.decode(result["ids"])


async def test_threads_are_refused_as_clients_expect_it(
    scripted: tuple[RunningGateway, ScriptedEngine],
) -> None:
    gateway, engine = scripted
    async with opened(gateway) as (client, _):
        with pytest.raises(anthropic.types.ThreadUnsupportedRequestError) as refused:
            await ask(client, HI, extra_body={"thread": {"type": "create"}})
        assert refused.value.body["error"]["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
        engine.replies.append("Here.")
        response = await ask(client, HI, extra_body={"thread": None})
    assert response.content[0].text == "Here."


async def test_tokens_are_counted_as_they_would_be_given(
    scripted: tuple[RunningGateway, ScriptedEngine],
) -> None:
    gateway, engine = scripted
    engine.replies += ["<think>\nlong thoughts\n</think>\n\nyes", "no"]
    messages: list[Any] = [HI]
    async with opened(gateway) as (client, episode):
        for _ in range(2):
            count = await client.messages.count_tokens(model="claude-opus", messages=messages, tools=[ADD])
            response = await ask(client, *messages, tools=[ADD])
            assert count.input_tokens == response.usage.input_tokens
            messages += [{"role": "assistant", "content": response.content}, HI]
    assert len([node for node in await nodes_of(gateway, episode) if node["sampled"]]) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_same_response(
    scripted: tuple[RunningGateway, ScriptedEngine], stream: bool
) -> None:
    gateway, engine = scripted
    engine.replies.append("<think>\nadd\n</think>\n\nso " + CALL % 1)
    before = len(engine.requests)
    responses = []
    async with opened(gateway) as (client, episode):
        for count in range(2):
            retry = {"x-stainless-retry-count": str(count)}
            responses.append(
                await ask(client, HI, tools=[ADD], thinking=THINKING, stream=stream, extra_headers=retry)
            )
            await until(lambda: not gateway.services.replies._completions, "only the record has the reply")
    first, again = responses
    assert first.model_dump() == again.model_dump()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert len(engine.requests) == before + 1
    assert len(await nodes_of(gateway, episode)) == 2


async def test_a_retry_of_a_stopped_reply_names_its_stop_sequence(
    scripted: tuple[RunningGateway, ScriptedEngine],
) -> None:
    gateway, engine = scripted
    engine.replies.append("one two three")
    responses = []
    async with opened(gateway) as (client, _):
        for _ in range(2):
            responses.append(
                await ask(client, HI, stop_sequences=["two"], extra_headers={"idempotency-key": "k"})
            )
            await until(lambda: not gateway.services.replies._completions, "only the record has the reply")
    assert [(response.content[0].text, response.stop_sequence) for response in responses] == [
        ("one ", "two")
    ] * 2


async def test_errors_are_the_sdks_own(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, _ = scripted
    async with opened(gateway) as (client, _episode):
        with pytest.raises(anthropic.BadRequestError) as refused:
            await ask(client, {"role": "user", "content": [{"type": "image", "source": {}}]})
        assert "'image'" in str(refused.value)
        with pytest.raises(anthropic.BadRequestError, match="top_k"):
            await ask(client, HI, extra_body={"top_k": -1})
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > 2047 maximum"
        ):
            await ask(client, {"role": "user", "content": "x" * 3000})
        with pytest.raises(anthropic.BadRequestError, match="'elsewhere' is an upstream model"):
            await ask(client, HI, model="elsewhere")
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await ask(client, HI, model="claude-unknown", stream=True)
        assert unknown.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "the model 'claude-unknown' does not exist"},
        }
        with pytest.raises(anthropic.AuthenticationError):
            await ask(client.with_options(api_key="wrong"), HI)


async def test_a_body_that_is_no_request(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, _ = scripted
    _, headers = await gateway.open("bad", mode="eval")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for content in (
            b"",
            b"{",
            b"[]",
            b"{}",
            b'{"model": 5}',
            b'{"model": "claude-opus", "messages": {}}',
        ):
            response = await gateway.http.post(path, content=content, headers=headers)
            assert response.status_code == 400
            assert response.json()["type"] == "error"
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_key_as_anthropics_clients_send_it(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, engine = scripted
    episode = await gateway.admin.open_episode("task", mode="eval")
    for headers in ({"x-api-key": episode.api_key}, {"authorization": f"Bearer {episode.api_key}"}):
        engine.replies.append("yes")
        response = await gateway.http.post(
            f"/e/{episode.episode_id}/v1/messages?beta=true",
            json={"model": "claude-opus", "max_tokens": 9, "messages": [HI]},
            headers={**headers, "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"},
        )
        assert response.json()["content"] == [{"type": "text", "text": "yes"}], response.text


async def lines(gateway: RunningGateway, headers: dict[str, str], **values: Any) -> AsyncIterator[str]:
    body = {"model": "claude-opus", "max_tokens": 50, "messages": [HI], "stream": True, **values}
    async with gateway.http.stream("POST", "/v1/messages", json=body, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            yield line


async def test_a_stream_that_waits_pings(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    """Hidden thinking is such a wait, too."""
    gateway, engine = scripted
    engine.replies.append("<think>\nhm\n</think>\n\nyes")
    _, headers = await gateway.open("pinged", mode="eval")
    engine.faults = Faults(delay_s=0.04)
    try:
        events = [line[7:] async for line in lines(gateway, headers) if line.startswith("event: ")]
    finally:
        engine.faults = Faults()
    assert "ping" in events
    shown = [event for event in events if event != "ping"]
    assert shown[:2] == ["message_start", "content_block_start"]
    assert {*shown[2:-3]} == {"content_block_delta"}
    assert shown[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_models_in_both_forms(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, _ = scripted
    async with opened(gateway) as (client, _episode):
        listed = await client.models.list(limit=2)
        assert [model.id for model in listed.data] == ["demo", "claude-opus"]
        assert (listed.first_id, listed.last_id, listed.has_more) == ("demo", "claude-opus", True)
        assert [model.id async for model in client.models.list(limit=1)] == [
            "demo",
            "claude-opus",
            "elsewhere",
        ]
        assert (await client.models.list(before_id="elsewhere", limit=1)).data[0].id == "claude-opus"
        found = await client.models.retrieve("claude-opus")
        assert (found.type, found.display_name, found.lifecycle) == ("model", "claude-opus", "active")
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.models.retrieve("org/none")
        assert unknown.value.body["type"] == "error"
        assert unknown.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            await client.models.list(after_id="unknown")
    found = (await gateway.http.get("/v1/models/demo")).json()
    assert found == {"id": "demo", "object": "model", "created": 0, "owned_by": "headgate"}
    missing = await gateway.http.get("/v1/models/org/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_description_of_the_api_has_no_dangling_reference(
    scripted: tuple[RunningGateway, ScriptedEngine],
) -> None:
    described = (await gateway_description(scripted[0])).json()
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/completions"):
        operation = described["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert "$ref" not in json.dumps(schema)
        assert "model" in schema["required"]


async def gateway_description(gateway: RunningGateway) -> httpx.Response:
    return await gateway.http.get("/openapi.json")
