"""semantic-kernel: a chat completion agent with a plugin, its stream, and a typed reply."""

from __future__ import annotations

from typing import Annotated

import openai
import pytest
from pydantic import BaseModel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function

from tests.compat.clients.gate import ADA, HELLO, MODEL, SUNNY, WEATHER, Episode


class Person(BaseModel):
    name: str
    age: int


class Weather:
    @kernel_function(name="get_weather")
    def get_weather(self, city: Annotated[str, "the city"]) -> str:
        """The weather in a city."""
        assert city == "Tokyo"
        return SUNNY


@pytest.fixture
def service(episode: Episode) -> OpenAIChatCompletion:
    client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)


async def test_a_reply(service: OpenAIChatCompletion, episode: Episode) -> None:
    done = await ChatCompletionAgent(service=service, name="agent").get_response("hello")
    assert str(done.message) == HELLO
    episode.check(turns=1)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_plugin_is_one_trajectory(
    service: OpenAIChatCompletion, episode: Episode, streamed: bool
) -> None:
    agent = ChatCompletionAgent(service=service, name="agent", plugins=[Weather()])
    if streamed:
        text = "".join([str(part.message) async for part in agent.invoke_stream(WEATHER)])
    else:
        text = str((await agent.get_response(WEATHER)).message)
    assert text == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]


async def test_a_typed_reply(service: OpenAIChatCompletion) -> None:
    settings = OpenAIChatPromptExecutionSettings(response_format=Person)
    agent = ChatCompletionAgent(service=service, name="agent", arguments=KernelArguments(settings))
    done = await agent.get_response(ADA)
    assert Person.model_validate_json(str(done.message)) == Person(name="Ada", age=36)
