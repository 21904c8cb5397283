"""The careless teacher that the tutorial's model imitates before GRPO: it can use the calculator, and mostly guesses.

It shows questions of the training split alone.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from typing import Any

from agents.models.chatcmpl_converter import Converter

from examples.calculator.agent import INSTRUCTIONS, calculate
from examples.demo.tasks import tasks

GUESSES = 0.6
"""The share of conversations in which the teacher guesses."""


def careless_teacher(seed: int) -> Iterator[dict[str, Any]]:
    """Yield conversations, most of them with a guess."""
    rng = random.Random(seed)
    while True:
        for task in tasks("train", seed):
            guess = int(task["answer"]) + rng.randint(-3, 3)
            yield conversation(task, guess if rng.random() < GUESSES else None)


def conversation(task: dict[str, Any], guess: int | None) -> dict[str, Any]:
    """Return the messages and tools of an episode that answers with a guess, or with the calculator's result."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": task["question"]},
    ]
    if guess is None:
        arguments = json.dumps({"expression": task["metadata"]["expression"]})
        call = {
            "id": "call-0",
            "type": "function",
            "function": {"name": calculate.name, "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": task["answer"]})
    messages.append({"role": "assistant", "content": task["answer"] if guess is None else f"about {guess}"})
    return {"messages": messages, "tools": tools()}


@functools.cache
def tools() -> list[dict[str, Any]]:
    """Return the agent's tools as the SDK sends them."""
    sent: dict[str, Any] = json.loads(json.dumps(Converter.tool_to_openai(calculate)))
    return [sent]
