"""`/v1/chat/completions` as the openai SDK sees it; the engine samples what the test wrote."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.agents import client_of
from tests.harness.gateways import RunningGateway
from tests.harness.records import nodes_of
from tests.harness.scripted import TOOL_CALL, TOOLS, USER, ScriptedEngine, scripted_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

Scripted = tuple[RunningGateway, ScriptedEngine]


@pytest.fixture(scope="module")
async def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scripted]:
    async with scripted_gateway(tiny_model, tmp_path_factory.mktemp("chat")) as both:
        yield both


@pytest.fixture
def scripted(shared: Scripted) -> Scripted:
    """The module's gateway, with nothing left of the test before."""
    shared[1].replies.clear()
    shared[1].requests.clear()
    return shared


async def whole(scripted: Scripted, reply: str, **body: Any) -> Any:
    """Return the SDK's completion when the engine samples `reply`."""
    gateway, engine = scripted
    engine.replies.append(reply)
    async with client_of(gateway, mode="eval") as (client, _):
        return await client.chat.completions.create(**{"model": "gpt-4o", "messages": [USER], **body})


async def streamed(scripted: Scripted, reply: str, **body: Any) -> list[Any]:
    """Return the SDK's chunks when the engine samples `reply`."""
    gateway, engine = scripted
    engine.replies.append(reply)
    async with client_of(gateway, mode="eval") as (client, _):
        body = {"model": "gpt-4o", "messages": [USER], "stream": True, **body}
        return [chunk async for chunk in await client.chat.completions.create(**body)]


def text_of(chunks: list[Any], name: str = "content") -> str:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    return "".join(getattr(delta, name, None) or "" for delta in deltas)


def finishes(chunks: list[Any]) -> list[str]:
    return [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]


async def test_a_whole_reply(scripted: Scripted) -> None:
    response = await whole(scripted, "Hello, wörld 🙂")
    assert response.object == "chat.completion"
    assert response.id.startswith("chatcmpl-")
    assert response.model == "gpt-4o"
    (choice,) = response.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello, wörld 🙂"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    request = scripted[1].requests[0]
    prompt, sampled = len(request["token_ids"]), len("Hello, wörld 🙂".encode()) + 1
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (prompt, sampled)
    assert response.usage.total_tokens == prompt + sampled
    assert request["sampling_params"]["max_tokens"] == 2048 - prompt, "the reply may fill the context"
    assert response.service_tier == "default"  # litellm's groq/ fails without it


async def test_a_streamed_reply_is_the_same(scripted: Scripted) -> None:
    chunks = await streamed(scripted, "Hello, wörld 🙂")
    assert text_of(chunks) == "Hello, wörld 🙂"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert finishes(chunks) == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 5, "text is streamed as it comes"


async def test_parameters_reach_the_engine(scripted: Scripted) -> None:
    await whole(scripted, "yes", temperature=0.25, top_p=0.5, seed=7)
    params = scripted[1].requests[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["seed"]) == (0.25, 0.5, 7)


async def test_a_stop_string_ends_the_reply_and_is_in_no_part_of_it(scripted: Scripted) -> None:
    response = await whole(scripted, "one two three", stop=["three", " two"])
    assert response.choices[0].message.content == "one"
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.completion_tokens == len("one two")
    chunks = await streamed(scripted, "one two three", stop=" two")
    assert text_of(chunks) == "one"
    assert finishes(chunks) == ["stop"]


async def test_what_was_sampled_after_a_stop_string_is_not_recorded(scripted: Scripted) -> None:
    gateway, engine = scripted
    for stream in (False, True):
        engine.replies.append("one two three")
        episode, headers = await gateway.open("stop", mode="eval")
        response = await gateway.chat(headers, stop=["two"], stream=stream)
        assert response.status_code == 200
        nodes = await nodes_of(gateway, episode)
        assert nodes[-1]["text"] == "one two"
        (call,) = (await gateway.admin.episode(episode))["calls"]
        assert (call["completion_tokens"], call["finish_reason"]) == (len("one two"), "stop")


async def test_log_probabilities_are_those_that_are_recorded(scripted: Scripted) -> None:
    gateway, engine = scripted
    for stream in (False, True):
        engine.replies.append("é yes")
        async with client_of(gateway, mode="eval") as (client, episode):
            response: Any = await client.chat.completions.create(
                model="m", messages=[USER], logprobs=True, stream=stream
            )
            choices = [c async for c in _choices(response)] if stream else response.choices
        entries = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
        turn = (await nodes_of(gateway, episode))[-1]
        assert [entry.logprob for entry in entries] == pytest.approx(turn["logprobs"])
        assert len(entries) == len("é yes".encode()) + 1
        assert entries[3].token == "y"
        assert entries[3].bytes == [ord("y")]


async def _choices(stream: Any) -> AsyncIterator[Any]:
    async for chunk in stream:
        for choice in chunk.choices:
            yield choice


async def test_thinking_is_given_apart(scripted: Scripted) -> None:
    reply = "<think>\nhmm, well\n</think>\n\nyes"
    message = (await whole(scripted, reply)).choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("yes", *["hmm, well"] * 2)
    chunks = await streamed(scripted, reply)
    assert text_of(chunks) == "yes"
    assert text_of(chunks, "reasoning_content") == text_of(chunks, "reasoning") == "hmm, well"


async def test_a_tool_call(scripted: Scripted) -> None:
    response = await whole(scripted, f"let me see\n{TOOL_CALL}", tools=TOOLS)
    (choice,) = response.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "let me see"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 1}
    assert call.id.startswith("call_")
    assert (await whole(scripted, TOOL_CALL, tools=TOOLS)).choices[0].message.content is None


async def test_streamed_tool_calls(scripted: Scripted) -> None:
    chunks = await streamed(scripted, f"{TOOL_CALL}\n{TOOL_CALL}", tools=TOOLS, tool_choice="auto")
    calls = [call for c in chunks for choice in c.choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1}, {"a": 1}]
    assert finishes(chunks) == ["tool_calls"]
    assert text_of(chunks) == ""


async def test_tools_are_in_the_prompt_unless_the_choice_is_none(scripted: Scripted) -> None:
    gateway, engine = scripted
    assert (await whole(scripted, TOOL_CALL, tools=TOOLS, tool_choice="none")).choices[
        0
    ].finish_reason == "stop"
    await whole(scripted, TOOL_CALL, tools=TOOLS)
    without, with_tools = (gateway.model.renderer.decode(r["token_ids"]) for r in engine.requests)
    assert '"name": "add"' in with_tools
    assert "add" not in without


async def test_every_event_of_a_stream_is_one_line_of_data(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies.append("yes")
    _, headers = await gateway.open("raw", mode="eval")
    response = await gateway.chat(headers, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert end == ""
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1])


async def test_the_address_responds(scripted: Scripted) -> None:
    """Clients of Anthropic's ask for HEAD of their base URL first, whatever that is."""
    http = scripted[0].http
    for path in ("/", "/e/some-episode", "/e/some-episode/"):
        response = await http.head(path)
        assert (response.status_code, response.content) == (200, b""), path
        assert (await http.get(path)).json()["name"] == "headgate"
