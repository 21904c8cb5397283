"""llama-index: OpenAILike, streams, and a FunctionAgent with a tool."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode


@pytest.fixture
def llm(episode: Episode) -> Any:
    given: Any = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return OpenAILike(model=MODEL, api_base=episode.base_url, api_key=episode.api_key, **given)


async def test_a_reply(llm: Any, episode: Episode) -> None:
    reply = await llm.achat([ChatMessage(role="user", content="hello")])
    assert reply.message.content == HELLO
    episode.check(turns=1)


async def test_a_stream(llm: Any) -> None:
    parts = [
        part.delta async for part in await llm.astream_chat([ChatMessage(role="user", content="count to 5")])
    ]
    assert "".join(part or "" for part in parts) == "1, 2, 3, 4, 5"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_with_a_tool_is_one_trajectory(llm: Any, episode: Episode, streamed: bool) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city."""
        assert city == "Tokyo"
        return SUNNY

    agent = FunctionAgent(tools=[get_weather], llm=llm, system_prompt="Use tools.", streaming=streamed)
    done = await agent.run(WEATHER)
    assert str(done) == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]
