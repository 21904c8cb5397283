"""strands: an Agent with a tool on its OpenAI model, and a typed reply."""

from __future__ import annotations

from typing import Any

import pytest
import strands
from pydantic import BaseModel
from strands.models.openai import OpenAIModel

from tests.compat.clients.gate import ADA, HELLO, MODEL, SUNNY, WEATHER, Episode


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@strands.tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Tokyo"
    return SUNNY


@pytest.fixture
def agent(episode: Episode) -> Any:
    client: Any = {"base_url": episode.base_url, "api_key": episode.api_key, "max_retries": 0}
    model = OpenAIModel(client_args=client, model_id=MODEL)
    return strands.Agent(model=model, tools=[get_weather], callback_handler=None)


def text_of(done: Any) -> str:
    return "".join(part.get("text", "") for part in done.message["content"])


def test_a_reply_with_its_usage(agent: Any, episode: Episode) -> None:
    done = agent("hello")
    assert text_of(done) == HELLO
    assert done.metrics.accumulated_usage["outputTokens"] > 0
    episode.check(turns=1)


def test_an_agent_with_a_tool_is_one_trajectory(agent: Any, episode: Episode) -> None:
    assert text_of(agent(WEATHER)) == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]


def test_a_typed_reply(agent: Any, episode: Episode) -> None:
    done = agent(ADA, structured_output_model=Person)
    assert done.structured_output == Person(name="Ada", age=36)
    episode.check()
