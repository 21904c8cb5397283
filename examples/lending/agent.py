"""The agent: one question, one long answer, with the `openai` package."""

from __future__ import annotations

import functools
from typing import Any

import openai

from examples.lending.tasks import score

MAX_TOKENS = 192


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return the reward of the task's own scorer."""
    answer = (
        await _client(base_url)
        .with_options(api_key=api_key)
        .chat.completions.create(
            model="gpt-4o-mini",
            messages=[{"role": "user", "content": task["question"]}],
            max_tokens=MAX_TOKENS,
        )
    )
    return score(task, answer.choices[0].message.content or "")


@functools.cache
def _client(base_url: str) -> openai.AsyncOpenAI:
    """One connection pool for all episodes; a call may wait through a whole training step."""
    return openai.AsyncOpenAI(base_url=base_url, api_key="set for each episode", timeout=900.0)
