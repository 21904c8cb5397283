"""crewai: a crew of one agent with a tool, on its own OpenAI and Anthropic clients."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"
os.environ["CREWAI_TESTING"] = "true"

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode


@tool("get_weather")
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Tokyo"
    return SUNNY


@pytest.fixture
def llm(episode: Episode) -> Any:
    return LLM(model=f"openai/{MODEL}", base_url=episode.base_url, api_key=episode.api_key)


def test_a_reply(llm: Any, episode: Episode) -> None:
    assert llm.call("hello") == HELLO
    episode.check(turns=1)


def test_a_crew_with_a_tool(llm: Any, episode: Episode) -> None:
    agent = Agent(
        role="forecaster", goal="Report the weather.", backstory="You know it.", llm=llm, tools=[get_weather]
    )
    task = Task(description=WEATHER, expected_output="One sentence.", agent=agent)
    done = Crew(agents=[agent], tasks=[task]).kickoff()
    assert SUNNY in done.raw
    episode.check()
