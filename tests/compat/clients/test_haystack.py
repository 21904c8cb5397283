"""haystack: OpenAIChatGenerator, its stream, and an Agent with a tool."""

from __future__ import annotations

from typing import Any

import pytest
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

from tests.compat.clients.gate import CITY, HELLO, MODEL, SUNNY, WEATHER, Episode


@pytest.fixture(params=[OpenAIChatGenerator, OpenAIResponsesChatGenerator])
def generator(request: pytest.FixtureRequest, episode: Episode) -> Any:
    key = Secret.from_token(episode.api_key)
    return request.param(model=MODEL, api_base_url=episode.base_url, api_key=key, max_retries=0)


def test_a_reply_with_its_usage(generator: Any, episode: Episode) -> None:
    [reply] = generator.run([ChatMessage.from_user("hello")])["replies"]
    assert reply.text == HELLO
    assert reply.meta["usage"]
    episode.check(turns=1)


def test_a_stream(generator: Any) -> None:
    parts: list[str] = []
    generator.run(
        [ChatMessage.from_user("count to 5")],
        streaming_callback=lambda part: parts.append(part.content or ""),
    )
    assert "".join(parts) == "1, 2, 3, 4, 5"


def test_an_agent_with_a_tool_is_one_trajectory(generator: Any, episode: Episode) -> None:
    weather = Tool(
        "get_weather", "The weather in a city.", CITY, lambda city: SUNNY if city == "Tokyo" else "?"
    )
    done = Agent(chat_generator=generator, tools=[weather]).run(messages=[ChatMessage.from_user(WEATHER)])
    assert done["last_message"].text == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]
