"""An assistant with a calculator, written with the openai-agents SDK, for questions and scores of reasoning-gym."""

from __future__ import annotations

import functools
import re
from typing import Any

import openai
from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from agents.exceptions import MaxTurnsExceeded

from examples.demo.tasks import score

INSTRUCTIONS = "Use the calculator. Then answer with the number."
_TERM = re.compile(r"\s*([+-]?)\s*(\d+)")


@function_tool
def calculate(expression: str) -> str:
    """Return the value of a sum, such as 7 - 3."""
    if not re.fullmatch(f"({_TERM.pattern})+", expression):
        return "not a sum"
    return str(sum(int(sign + digits) for sign, digits in _TERM.findall(expression)))


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Answer one question, and return the score of reasoning-gym with the number of tool calls."""
    model = OpenAIChatCompletionsModel("gpt-4o-mini", _client(base_url).with_options(api_key=api_key))
    settings = ModelSettings(temperature=0, max_tokens=512)
    agent = Agent(
        "assistant", instructions=INSTRUCTIONS, tools=[calculate], model=model, model_settings=settings
    )
    try:
        result = await Runner.run(
            agent, task["question"], max_turns=4, run_config=RunConfig(tracing_disabled=True)
        )
    except (MaxTurnsExceeded, ModelBehaviorError):  # the model's fault
        return {"reward": 0.0}
    calls = sum(item.type == "tool_call_item" for item in result.new_items)
    return {"reward": score(task, str(result.final_output)), "components": {"tool_calls": float(calls)}}


@functools.cache
def _client(base_url: str) -> openai.AsyncOpenAI:
    """Return the connection pool of all episodes."""
    return openai.AsyncOpenAI(base_url=base_url, api_key="set for each episode")
