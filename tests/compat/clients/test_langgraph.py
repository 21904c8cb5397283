"""langgraph: its prebuilt ReAct agent, with a tool."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Tokyo"
    return SUNNY


def agent(episode: Episode, model: str = MODEL, **kwargs: Any) -> Any:
    chat = ChatOpenAI(
        model=model, base_url=episode.base_url, api_key=episode.api_key, max_retries=0, **kwargs
    )
    return create_react_agent(chat, [get_weather], prompt="Use tools.", checkpointer=InMemorySaver())


THREAD: Any = {"configurable": {"thread_id": "one"}}


def test_an_agent_with_a_memory_is_one_trajectory(episode: Episode) -> None:
    graph = agent(episode)
    done = graph.invoke({"messages": [("user", WEATHER)]}, THREAD)
    assert done["messages"][-1].content == f"The answer is {SUNNY}."
    done = graph.invoke({"messages": [("user", "hello")]}, THREAD)
    assert done["messages"][-1].content == HELLO
    episode.check(turns=3)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2, 3, 4]


async def test_async_with_streamed_tokens(episode: Episode) -> None:
    graph = agent(episode, streaming=True)
    parts = [
        part.content
        async for part, about in graph.astream(
            {"messages": [("user", WEATHER)]}, THREAD, stream_mode="messages"
        )
        if about["langgraph_node"] == "agent"
    ]
    assert "".join(parts) == f"The answer is {SUNNY}."
    episode.check(turns=2)


def test_responses(episode: Episode) -> None:
    done = agent(episode, use_responses_api=True).invoke({"messages": [("user", WEATHER)]}, THREAD)
    assert done["messages"][-1].text == f"The answer is {SUNNY}."
    episode.check(turns=2)


def test_errors_are_the_sdks_own(episode: Episode) -> None:
    with pytest.raises(openai.NotFoundError):
        agent(episode, "no-such-model").invoke({"messages": [("user", "hello")]}, THREAD)
