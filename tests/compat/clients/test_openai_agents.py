"""openai-agents, with its model for chat completions and its model for responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import agents
import openai
import pytest
from pydantic import BaseModel

from tests.compat.clients.gate import ADA, HELLO, MODEL, SUNNY, WEATHER, Episode


class Person(BaseModel):
    name: str
    age: int


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Tokyo"
    return SUNNY


@pytest.fixture(params=["chat", "responses"])
async def model(episode: Episode, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    agents.set_tracing_disabled(True)
    kind = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel
    async with openai.AsyncOpenAI(
        base_url=episode.base_url, api_key=episode.api_key, max_retries=0
    ) as client:
        yield kind(model=MODEL, openai_client=client)


async def test_a_reply_with_its_usage(model: Any, episode: Episode) -> None:
    done = await agents.Runner.run(agents.Agent(name="plain", instructions="Be short.", model=model), "hello")
    assert done.final_output == HELLO
    assert done.context_wrapper.usage.total_tokens > 0
    episode.check(turns=1)


async def test_a_stream(model: Any) -> None:
    done = agents.Runner.run_streamed(agents.Agent(name="stream", model=model), "count to 5")
    deltas = [
        event.data.delta
        async for event in done.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == done.final_output == "1, 2, 3, 4, 5"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_with_a_tool_is_one_trajectory(model: Any, episode: Episode, streamed: bool) -> None:
    agent = agents.Agent(name="weather", instructions="Use tools.", model=model, tools=[get_weather])
    if streamed:
        done = agents.Runner.run_streamed(agent, WEATHER)
        async for _ in done.stream_events():
            pass
    else:
        done = await agents.Runner.run(agent, WEATHER)
    assert done.final_output == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]


async def test_a_handoff_is_a_branch(model: Any, episode: Episode) -> None:
    forecaster = agents.Agent(
        name="forecaster", instructions="You forecast.", model=model, tools=[get_weather]
    )
    first = agents.Agent(name="first", instructions="Hand over.", model=model, handoffs=[forecaster])
    done = await agents.Runner.run(first, f"transfer_to_forecaster, please. {WEATHER}")
    assert done.last_agent.name == "forecaster"
    episode.check(turns=2)


async def test_a_typed_output(model: Any) -> None:
    done = await agents.Runner.run(agents.Agent(name="typed", model=model, output_type=Person), ADA)
    assert done.final_output == Person(name="Ada", age=36)


async def test_errors_are_the_sdks_own(model: Any) -> None:
    model.model = "no-such-model"
    with pytest.raises(openai.NotFoundError):
        await agents.Runner.run(agents.Agent(name="unknown", model=model), "hello")
    model.model = MODEL
    settings = agents.ModelSettings(temperature=9)
    with pytest.raises(openai.BadRequestError):
        await agents.Runner.run(agents.Agent(name="hot", model=model, model_settings=settings), "hello")
