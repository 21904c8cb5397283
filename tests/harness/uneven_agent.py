"""The demo's agent with rewards that differ in every group, whatever the model says: every second answer to a task gets one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from examples.demo import agent

_answers = Counter[str]()


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Asks the task's question; the reward is that of its number."""
    await agent.solve(task, base_url, api_key)
    _answers[task["task_id"]] += 1
    return float(_answers[task["task_id"]] % 2)
