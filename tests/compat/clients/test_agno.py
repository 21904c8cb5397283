"""agno: an Agent with a tool, on its models for chat completions and for responses."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["AGNO_TELEMETRY"] = "false"

from agno.agent import Agent
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode


def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Tokyo"
    return SUNNY


@pytest.fixture(params=[OpenAILike, OpenAIResponses])
def agent(request: pytest.FixtureRequest, episode: Episode) -> Any:
    model = request.param(id=MODEL, base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    return Agent(model=model, tools=[get_weather], telemetry=False)


def test_a_reply_with_its_usage(agent: Any, episode: Episode) -> None:
    done = agent.run("hello")
    assert done.content == HELLO
    assert done.metrics.output_tokens > 0
    episode.check(turns=1)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_with_a_tool_is_one_trajectory(agent: Any, episode: Episode, streamed: bool) -> None:
    if streamed:
        parts = agent.run(WEATHER, stream=True)
        text = "".join(part.content or "" for part in parts if part.event == "RunContent")
    else:
        text = agent.run(WEATHER).content
    assert text == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]
