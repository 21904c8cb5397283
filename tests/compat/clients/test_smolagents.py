"""smolagents: a ToolCallingAgent and a CodeAgent on OpenAIServerModel."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import smolagents

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, Episode


@smolagents.tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    assert city == "Tokyo"
    return SUNNY


def model_of(episode: Episode, name: str = MODEL, **kwargs: Any) -> Any:
    client: Any = {"max_retries": 0}
    return smolagents.OpenAIServerModel(
        name, api_base=episode.base_url, api_key=episode.api_key, client_kwargs=client, **kwargs
    )


def test_a_reply_with_its_usage(episode: Episode) -> None:
    reply = model_of(episode).generate([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert reply.content == HELLO
    assert reply.token_usage.output_tokens > 0
    episode.check(turns=1)


def test_a_stream(episode: Episode) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "count to 5"}]}]
    parts = [delta.content or "" for delta in model_of(episode).generate_stream(messages)]
    assert "".join(parts) == "1, 2, 3, 4, 5"


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_that_calls_tools(episode: Episode, choice: str, streamed: bool) -> None:
    agent = smolagents.ToolCallingAgent(
        [get_weather], model_of(episode, tool_choice=choice), max_steps=4, stream_outputs=streamed
    )
    task = f"""The weather in Tokyo.
SCRIPT: get_weather {{"city": "Tokyo"}}
SCRIPT: final_answer {{"answer": "{SUNNY}"}}"""
    assert agent.run(task) == SUNNY
    episode.check(turns=2)


def test_an_agent_that_writes_code(episode: Episode) -> None:
    agent = smolagents.CodeAgent([get_weather], model_of(episode), max_steps=4)
    task = "The weather.\nSCRIPT: Thought: I ask. <code>final_answer(get_weather(city='Tokyo'))</code>"
    assert agent.run(task) == SUNNY
    episode.check(turns=1)


def test_errors_are_its_own(episode: Episode) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    with pytest.raises(openai.NotFoundError):
        model_of(episode, "no-such-model").generate(messages)
    with pytest.raises(openai.BadRequestError):
        model_of(episode, temperature=9).generate(messages)
