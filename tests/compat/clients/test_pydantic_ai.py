"""pydantic-ai, by all three APIs: chat completions, responses, Anthropic's messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.compat.clients.gate import ADA, HELLO, MODEL, SUNNY, WEATHER, Episode


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Tokyo"
    return SUNNY


def model_of(kind: str, episode: Episode, name: str = MODEL) -> Any:
    if kind == "anthropic":
        anthropic = AnthropicProvider(api_key=episode.api_key, base_url=episode.root)
        return AnthropicModel(name, provider=anthropic)
    provider = OpenAIProvider(base_url=episode.base_url, api_key=episode.api_key)
    return (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)(name, provider=provider)


@pytest.fixture(params=["chat", "responses", "anthropic"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_reply_with_its_usage(kind: str, episode: Episode) -> None:
    done = await Agent(model_of(kind, episode), instructions="Be short.").run("hello")
    assert done.output == HELLO
    used = done.usage if not callable(done.usage) else done.usage()
    assert used.output_tokens > 0
    episode.check(turns=1)


async def test_a_stream(kind: str, episode: Episode) -> None:
    async with Agent(model_of(kind, episode)).run_stream("count to 5") as stream:
        parts = [part async for part in stream.stream_text(delta=True)]
    assert "".join(parts) == "1, 2, 3, 4, 5"


async def test_an_agent_with_a_tool_is_one_trajectory(kind: str, episode: Episode) -> None:
    agent = Agent(model_of(kind, episode), instructions="Use tools.", tools=[get_weather])
    done = await agent.run(WEATHER)
    assert done.output == f"The answer is {SUNNY}."
    done = await agent.run("hello", message_history=done.all_messages())
    assert done.output == HELLO
    episode.check(turns=3)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput], ids=["tool", "native"])
async def test_a_typed_output(kind: str, episode: Episode, form: Any) -> None:
    name = "claude-sonnet-4-5" if kind == "anthropic" else MODEL  # the client asks only models that it knows
    done = await Agent(model_of(kind, episode, name), output_type=form(Person)).run(ADA)
    assert done.output == Person(name="Ada", age=36)


async def test_errors_are_its_own(kind: str, episode: Episode) -> None:
    with pytest.raises(ModelHTTPError) as found:
        await Agent(model_of(kind, episode, "no-such-model")).run("hello")
    assert found.value.status_code == 404
    with pytest.raises(ModelHTTPError) as refused:
        await Agent(model_of(kind, episode), model_settings={"temperature": 9.0}).run("hello")
    assert refused.value.status_code == 400
