"""The hasty teacher whom the demo's model imitates before it is trained, on maps of the training split alone.

It knows the form of a tool call and that the goal is down and to the right. Mostly it goes down until the edge, and then right,
and seldom looks where it steps; now and then it goes anywhere. What is to be found from the environment's rewards alone:
look at each step, and go round holes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from examples.frozen_lake.agent import MAX_STEPS, TOOL, opening
from examples.frozen_lake.lake import MOVES, Crossing
from examples.frozen_lake.tasks import lakes

WHIM = 0.1
"""The chance that a step goes anywhere."""
GLANCE = 0.25
"""The chance that the teacher looks, and steps into no hole if there is another way."""
HASTE = 0.8
"""The chance that it goes down, where it could go right as well."""


def hasty_teacher(seed: int) -> Iterator[dict[str, Any]]:
    """Yield an endless stream of conversations, most of which end in a hole."""
    rng = random.Random(f"steps {seed}")
    for lake in lakes("train", f"teacher {seed}"):
        yield conversation(lake, rng)


def conversation(lake: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Return a walk over a map, with the messages and tools that the agent sends, up to the call that ends it."""
    crossing = Crossing(lake)
    messages = opening(crossing)
    for step in range(MAX_STEPS):
        direction = step_towards_goal(crossing.view(), rng)
        function = {"name": TOOL["function"]["name"], "arguments": json.dumps({"direction": direction})}
        call = {"id": f"call-{step}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        view = crossing.move(direction)
        if crossing.over or step == MAX_STEPS - 1:
            break
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": view})
    return {"messages": messages, "tools": [TOOL]}


def step_towards_goal(view: str, rng: random.Random) -> str:
    """Return down or right, mostly down; never over the edge, and seldom with regard to holes."""
    if rng.random() < WHIM:
        return rng.choice(list(MOVES))
    ways = [way for way in ("down", "right") if f"{way}: edge" not in view]
    if rng.random() < GLANCE:
        ways = [way for way in ways if f"{way}: hole" not in view] or ways
    return ways[0] if rng.random() < HASTE else ways[-1]
