"""The careless teacher whom the demo's model imitates before GRPO: how episodes go, on orders of the training split alone.

It shows the right form of a tool call, one item after the other, and then the sums from price to price ("4 7 12" for 4, 3 and 5).
It has two bad habits. In most episodes it thinks that two prices will do, and answers with the sum of these; and now and then it
asks again for the item before, instead of the next one. A model that imitates it adds well and answers too early; what GRPO has
to find, from the scorer alone, is that it pays to look up the whole order.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agents.models.chatcmpl_converter import Converter

from examples.tools_demo.agent import INSTRUCTIONS, price
from examples.tools_demo.tasks import orders, question_of

IMPATIENCE = 0.6
"""The chance that the teacher answers after `ENOUGH` prices, although items are left."""
ENOUGH = 2
FORGETFULNESS = 0.15
"""The chance that the teacher asks for the item before once more, instead of the next one."""


def careless_teacher(seed: int) -> Iterator[dict[str, Any]]:
    """Yield an endless stream of conversations, most of them wrong on purpose (see above)."""
    rng = random.Random(f"habits {seed}")
    for order, prices in orders("train", f"teacher {seed}"):
        yield conversation(order, prices, lookups_of(order, rng))


def lookups_of(order: Sequence[str], rng: random.Random) -> list[str]:
    """Return the items that the teacher asks for, one after the other, before it answers."""
    lookups = ENOUGH if rng.random() < IMPATIENCE else len(order)
    looked_up: list[str] = []
    for place, item in enumerate(order[:lookups]):
        repeats = place > 0 and rng.random() < FORGETFULNESS
        looked_up.append(order[place - 1] if repeats else item)
    return looked_up


def conversation(order: Sequence[str], prices: Mapping[str, int], looked_up: Sequence[str]) -> dict[str, Any]:
    """Return an episode in which the prices of `looked_up` are looked up and added, with the messages and tools that the agent
    sends."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question_of(order)},
    ]
    for number, item in enumerate(looked_up):
        function = {"name": price.name, "arguments": json.dumps({"item": item})}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(prices[item])})
    sums = itertools.accumulate(prices[item] for item in looked_up)
    messages.append({"role": "assistant", "content": " ".join(map(str, sums))})
    return {"messages": messages, "tools": tools()}


@functools.cache
def tools() -> list[dict[str, Any]]:
    """Return the agent's tools as the SDK sends them."""
    sent: dict[str, Any] = json.loads(json.dumps(Converter.tool_to_openai(price)))
    return [sent]
