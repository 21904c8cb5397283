"""Examples' agents with rewards that differ in every group, for any model: every second answer to a task gets one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from examples.demo import agent
from examples.lending import agent as lending_agent

_answers = Counter[str]()


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Send the demo's question; the reward is that of its number."""
    await agent.solve(task, base_url, api_key)
    return _next(task)


async def solve_of_lending(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Send the lending example's question; the reward is that of its number."""
    await lending_agent.solve(task, base_url, api_key)
    return _next(task)


def _next(task: dict[str, Any]) -> float:
    _answers[task["task_id"]] += 1
    return float(_answers[task["task_id"]] % 2)
