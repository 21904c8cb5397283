"""The anthropic SDK: messages, streams, tools, thinking, counting tokens, and its exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.compat.clients.gate import AGENT, AGENT_KEY, CITY, HELLO, MODEL, SUNNY, WEATHER, Episode, Gate

TOOL: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": CITY}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


@pytest.fixture
def client(episode: Episode) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=episode.root, api_key=episode.api_key, max_retries=0) as opened:
        yield opened


def test_one_key_names_the_episode_of_each_client_by_a_header(gate: Gate) -> None:
    for episode in [gate.open("named", AGENT) for _ in range(2)]:
        named: Any = {"base_url": episode.root, "api_key": AGENT_KEY, "default_headers": episode.header}
        with anthropic.Anthropic(**named, max_retries=0) as client:
            response = client.messages.create(model=MODEL, max_tokens=100, messages=[user("hello")])
        assert response.content[0].text == HELLO
        episode.check(turns=1)


def test_a_reply_with_its_usage(client: Any, episode: Episode) -> None:
    response = client.messages.create(
        model=MODEL, max_tokens=100, system="Be short.", messages=[user("hello")]
    )
    assert [block.text for block in response.content] == [HELLO]
    assert response.stop_reason == "end_turn"
    assert response.usage.input_tokens > 0
    assert response.usage.output_tokens > 0
    episode.check(turns=1)


def test_max_tokens_and_stop_sequences(client: Any) -> None:
    response = client.messages.create(model=MODEL, max_tokens=5, messages=[user("hello")])
    assert (response.content[0].text, response.stop_reason) == (HELLO[:5], "max_tokens")
    response = client.messages.create(
        model=MODEL, max_tokens=100, stop_sequences=["scripted"], messages=[user("hello")]
    )
    assert (response.stop_reason, response.stop_sequence) == ("stop_sequence", "scripted")
    assert response.content[0].text == "Hello from the "


async def test_async(episode: Episode) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=episode.root, api_key=episode.api_key, max_retries=0
    ) as client:
        response = await client.messages.create(model=MODEL, max_tokens=100, messages=[user("hello")])
        async with client.messages.stream(model=MODEL, max_tokens=100, messages=[user("hello")]) as stream:
            text = "".join([part async for part in stream.text_stream])
    assert response.content[0].text == text == HELLO


def test_a_stream(client: Any) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=[user("count to 5")]) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert text == whole.content[0].text == "1, 2, 3, 4, 5"
    assert whole.stop_reason == "end_turn"
    assert whole.usage.output_tokens > 0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_conversation_with_a_tool_is_one_trajectory(client: Any, episode: Episode, streamed: bool) -> None:
    messages: list[Any] = [user(WEATHER)]
    for _ in range(2):
        body: Any = {"model": MODEL, "max_tokens": 500, "tools": [TOOL], "messages": messages}
        if streamed:
            with client.messages.stream(**body) as stream:
                response = stream.get_final_message()
        else:
            response = client.messages.create(**body)
        messages.append({"role": "assistant", "content": response.content})
        uses = [block for block in response.content if block.type == "tool_use"]
        if uses:
            assert response.stop_reason == "tool_use"
            assert uses[0].input == {"city": "Tokyo"}
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": SUNNY} for use in uses]
            messages.append(user(results))
    assert messages[-1]["content"][0].text == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]


def test_a_tool_can_be_required_or_named(client: Any) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        response = client.messages.create(
            model=MODEL, max_tokens=200, messages=[user("hello")], tools=[TOOL], tool_choice=choice
        )
        assert [block.name for block in response.content if block.type == "tool_use"] == ["get_weather"]


def test_thinking_is_a_block_of_its_own(client: Any) -> None:
    response = client.messages.create(
        model=MODEL,
        max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 2000},
        messages=[user("think aloud: hello")],
    )
    assert [block.type for block in response.content] == ["thinking", "text"]
    assert "Let me see." in response.content[0].thinking
    assert response.content[1].text == HELLO


def test_tokens_are_counted(client: Any) -> None:
    messages = [user("hello")]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL])
    response = client.messages.create(model=MODEL, max_tokens=10, messages=messages, tools=[TOOL])
    assert counted.input_tokens == response.usage.input_tokens


def test_errors_are_the_sdks_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as found:
        client.messages.create(model="no-such-model", max_tokens=10, messages=[user("hello")])
    assert found.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(
            model=MODEL, max_tokens=10, messages=[user("hello")], extra_body={"temperature": 9}
        )
    assert "temperature" in str(refused.value)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=9, messages=[user("hi")])
