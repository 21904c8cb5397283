"""google-adk: an LlmAgent with a tool on its LiteLlm model."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched at import

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode


def get_weather(city: str) -> dict[str, str]:
    """The weather in a city."""
    assert city == "Tokyo"
    return {"weather": SUNNY}


async def reply_to(episode: Episode, text: str, tools: list[Any], streamed: bool = False) -> str:
    model = LiteLlm(
        model=f"openai/{MODEL}", api_base=episode.base_url, api_key=episode.api_key, num_retries=0
    )
    runner = InMemoryRunner(LlmAgent(name="agent", model=model, instruction="Be short.", tools=tools))
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=text)])
    mode = RunConfig(streaming_mode=StreamingMode.SSE if streamed else StreamingMode.NONE)
    last = ""
    async for event in runner.run_async(
        user_id="user", session_id=session.id, new_message=message, run_config=mode
    ):
        if event.is_final_response() and event.content:
            last = "".join(part.text or "" for part in event.content.parts)
    return last


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_reply(episode: Episode, streamed: bool) -> None:
    assert await reply_to(episode, "hello", [], streamed) == HELLO
    episode.check(turns=1)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_with_a_tool_is_one_trajectory(episode: Episode, streamed: bool) -> None:
    assert SUNNY in await reply_to(episode, WEATHER, [get_weather], streamed)
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]
