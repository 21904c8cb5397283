"""The agent of the demo with tools: written with the openai-agents SDK, and nothing in it knows that a model is being trained.

A shop's assistant gets the question what an order costs. It sees prices only through its tool, calls it as often as it likes, and
answers. All that was changed for headgate are two values that its client accepts anyway: a base URL and a key.
"""

from __future__ import annotations

import functools
from typing import Any

import openai
from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    function_tool,
)
from agents.exceptions import MaxTurnsExceeded

from examples.tools_demo.tasks import score

INSTRUCTIONS = "Look up the price of each item, then add them up."
MAX_TURNS = 7


@function_tool
def price(context: RunContextWrapper[dict[str, int]], item: str) -> str:
    """Return the price of an item."""
    return str(context.context.get(item, "no such item"))


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Answer for one order in at most MAX_TURNS turns, and return the reward of the task's own scorer."""
    client = _client(base_url).with_options(api_key=api_key)
    agent: Agent[dict[str, int]] = Agent(
        name="shop",
        instructions=INSTRUCTIONS,
        tools=[price],
        model=OpenAIChatCompletionsModel(model="gpt-4o-mini", openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=32),
    )
    try:
        result = await Runner.run(
            agent,
            task["question"],
            context=task["prices"],
            max_turns=MAX_TURNS,
            run_config=RunConfig(tracing_disabled=True),
        )
    except (MaxTurnsExceeded, ModelBehaviorError):
        # The model called a tool that does not exist, or used up its turns.
        return {"reward": 0.0}
    calls = sum(item.type == "tool_call_item" for item in result.new_items)
    return {"reward": score(task, str(result.final_output)), "components": {"tool_calls": float(calls)}}


@functools.cache
def _client(base_url: str) -> openai.AsyncOpenAI:
    """One connection pool for all episodes: making a client costs more than a whole turn."""
    return openai.AsyncOpenAI(base_url=base_url, api_key="set for each episode")
