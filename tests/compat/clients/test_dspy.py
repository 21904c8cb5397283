"""dspy: a Predict and a ReAct with a tool, on its LM."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched at import

import dspy

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode


@pytest.fixture
def lm(episode: Episode) -> Any:
    return dspy.LM(
        f"openai/{MODEL}", api_base=episode.base_url, api_key=episode.api_key, cache=False, num_retries=0
    )


def scripted(text: str, **fields: object) -> str:
    """A question that has the engine answer with these fields, as dspy's JSON adapter asks its models to."""
    return f"{text}\nSCRIPT: {json.dumps(fields)}"


def test_a_reply(lm: Any, episode: Episode) -> None:
    assert lm("hello") == [HELLO]
    episode.check(turns=1)


def test_a_prediction(lm: Any, episode: Episode) -> None:
    question = scripted("Which city, Tokyo or Rome?", answer="Tokyo")
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        done = dspy.Predict("question -> answer")(question=question)
    assert done.answer == "Tokyo"
    episode.check(turns=1)


def test_an_agent_with_a_tool(lm: Any, episode: Episode) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city."""
        assert city == "Tokyo"
        return SUNNY

    step = {"next_thought": "Look.", "next_tool_name": "get_weather", "next_tool_args": {"city": "Tokyo"}}
    question = scripted(WEATHER, **step, reasoning="I looked.", answer="sunny")
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        done = dspy.ReAct("question -> answer", tools=[get_weather], max_iters=1)(question=question)
    assert done.trajectory["observation_0"] == SUNNY
    assert done.answer == "sunny"
    episode.check(turns=2)
