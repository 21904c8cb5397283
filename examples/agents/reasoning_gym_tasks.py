"""Tasks and scores of reasoning-gym: it makes as many tasks as you like, and scores the answers.

python examples/agents/reasoning_gym_tasks.py 100 > tasks.jsonl
gateway episodes run --tasks tasks.jsonl --group-size 4 --agent examples/agents/reasoning_gym_tasks.py:solve
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import reasoning_gym

NAME = "basic_arithmetic"
SCORER = reasoning_gym.create_dataset(NAME, size=1, seed=0)


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer one question, and return the dataset's own score."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        reply = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": task["question"] + " Answer with the number alone."}],
            max_tokens=64,
        )
    return float(SCORER.score_answer((reply.choices[0].message.content or "").strip(), task))


def main(count: int) -> None:
    """Print tasks, one a line."""
    for number, entry in enumerate(reasoning_gym.create_dataset(NAME, size=count, seed=1)):
        print(json.dumps({"task_id": f"{NAME}-{number}", **entry}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
