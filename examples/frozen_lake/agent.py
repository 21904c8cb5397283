"""The agent of the demo on a lake: written with the `openai` package, and nothing in it knows that a model is being trained.

It sees what is around it through its tool alone, and calls the tool for each step until it is across, in a hole, or out of time.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import openai

from examples.frozen_lake.lake import MOVES, Crossing

INSTRUCTIONS = "Cross the lake: the goal is at the bottom right. Walk on ice, and not into holes."
MAX_STEPS = 10
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Go one tile, and see what is around.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": list(MOVES)}},
            "required": ["direction"],
        },
    },
}


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Cross one lake in at most MAX_STEPS steps; return the environment's reward, 1 at the goal and 0 elsewhere."""
    client = _client(base_url).with_options(api_key=api_key)
    tools: list[Any] = [TOOL]
    crossing, steps = Crossing(task["map"]), 0
    messages: list[Any] = opening(crossing)
    while steps < MAX_STEPS and not crossing.over:
        answer = await client.chat.completions.create(
            model="gpt-4o-mini", messages=messages, tools=tools, temperature=0, max_tokens=16
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        calls: list[Any] = [*message.tool_calls]
        for call in calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": use(call.function, crossing)}
            )
        steps += 1
    return {"reward": crossing.reward, "components": {"steps": float(steps)}}


def opening(crossing: Crossing) -> list[dict[str, Any]]:
    """Return the messages of the first call."""
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": crossing.view()}]


def use(function: Any, crossing: Crossing) -> str:
    """Return the tool's answer; a wrong call gets an answer too, and moves nothing."""
    try:
        return crossing.move(json.loads(function.arguments)["direction"])
    except (ValueError, KeyError, TypeError):
        return f"error: a direction is one of {', '.join(MOVES)}"


@functools.cache
def _client(base_url: str) -> openai.AsyncOpenAI:
    """One connection pool for all episodes: making a client costs more than a whole turn."""
    return openai.AsyncOpenAI(base_url=base_url, api_key="set for each episode")
