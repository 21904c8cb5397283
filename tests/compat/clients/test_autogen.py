"""autogen: its OpenAI and Anthropic clients, and an AssistantAgent with a tool."""

from __future__ import annotations

from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.anthropic import AnthropicChatCompletionClient
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


@pytest.fixture(params=["openai", "anthropic"])
def client(request: pytest.FixtureRequest, episode: Episode) -> Any:
    given: Any = {"model": MODEL, "api_key": episode.api_key, "model_info": INFO, "max_retries": 0}
    if request.param == "anthropic":
        return AnthropicChatCompletionClient(base_url=episode.root, **given)
    return OpenAIChatCompletionClient(base_url=episode.base_url, **given)


def hello(text: str = "hello") -> list[Any]:
    return [UserMessage(content=text, source="user")]


async def test_a_reply_with_its_usage(client: Any, episode: Episode) -> None:
    reply = await client.create(hello())
    assert reply.content == HELLO
    assert reply.usage.completion_tokens > 0
    episode.check(turns=1)


async def test_a_stream(client: Any) -> None:
    parts = [part async for part in client.create_stream(hello("count to 5"))]
    assert "".join(part for part in parts if isinstance(part, str)) == "1, 2, 3, 4, 5"


async def test_an_agent_with_a_tool_is_one_trajectory(client: Any, episode: Episode) -> None:
    async def get_weather(city: str) -> str:
        """The weather in a city."""
        assert city == "Tokyo"
        return SUNNY

    agent = AssistantAgent("weather", client, tools=[get_weather], reflect_on_tool_use=True)
    done = await agent.run(task=WEATHER)
    assert done.messages[-1].content == f"The answer is {SUNNY}."
    episode.check(turns=2)
