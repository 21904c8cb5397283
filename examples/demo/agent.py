"""The demo's agent: written with the `openai` package, and nothing in it knows that a model is being trained.

It asks for a model by a name of its own and for temperature 0, as agents do. In training episodes the gateway's configuration
samples at temperature 1 instead; the agent sees no difference.
"""

from __future__ import annotations

import functools
from typing import Any

import openai

from examples.demo.tasks import score

MODEL = "gpt-4o-mini"


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer one question, and return the reward of the task's own scorer."""
    stream = (
        await _client(base_url)
        .with_options(api_key=api_key)
        .chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": task["question"]}],
            temperature=0,
            max_tokens=16,
            stream=True,
        )
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return score(task, "".join(parts))


@functools.cache
def _client(base_url: str) -> openai.AsyncOpenAI:
    """One connection pool for all episodes: making a client costs more than the whole call."""
    return openai.AsyncOpenAI(base_url=base_url, api_key="set for each episode")
