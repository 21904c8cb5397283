"""mirascope: calls, streams, tools and typed replies, over chat completions and responses."""

from __future__ import annotations

import pytest
from mirascope import llm
from pydantic import BaseModel

from tests.compat.clients.gate import ADA, HELLO, MODEL, SUNNY, WEATHER, Episode


class Person(BaseModel):
    name: str
    age: int


@llm.tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Tokyo"
    return SUNNY


@pytest.fixture(params=["completions", "responses"])
def model(request: pytest.FixtureRequest, episode: Episode) -> llm.Model:
    llm.register_provider("openai", base_url=episode.base_url, api_key=episode.api_key)
    return llm.Model(f"openai/{MODEL}:{request.param}")


def test_a_reply_with_its_usage(model: llm.Model, episode: Episode) -> None:
    done = model.call("hello")
    assert done.text() == HELLO
    assert done.usage is not None and done.usage.output_tokens > 0
    episode.check(turns=1)


def test_a_stream(model: llm.Model) -> None:
    assert "".join(model.stream("count to 5").text_stream()).strip() == "1, 2, 3, 4, 5"


def test_a_tool_is_one_trajectory(model: llm.Model, episode: Episode) -> None:
    done = model.call(WEATHER, tools=[get_weather])
    done = done.resume(done.execute_tools())
    assert done.text() == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]


def test_a_typed_reply(model: llm.Model) -> None:
    assert model.call(ADA, format=Person).parse() == Person(name="Ada", age=36)
