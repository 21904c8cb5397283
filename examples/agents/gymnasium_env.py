"""An environment of gymnasium, one call of the model a step; the reward is the environment's own.

This agent is an async function: the driver calls it in its own process, which costs less than a command for each episode.

gateway episodes run --tasks examples/agents/tasks.jsonl --group-size 4 --agent examples/agents/gymnasium_env.py:solve
"""

from __future__ import annotations

import zlib
from typing import Any

import gymnasium
import openai
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
SYSTEM = "Cross the frozen lake from S to G, and stay off the holes H. Answer with left, down, right or up."
MAX_STEPS = 10


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Cross one lake; a task's name is the seed of its map."""
    seed = zlib.crc32(task["task_id"].encode())
    rows = generate_random_map(size=4, seed=seed)
    env = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=False)
    position, _ = env.reset(seed=seed)
    messages: list[Any] = [{"role": "system", "content": SYSTEM + "\n" + "\n".join(rows)}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_STEPS):
            here = f"You are in row {position // 4 + 1}, column {position % 4 + 1}."
            messages.append({"role": "user", "content": here})
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=16)
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            if text.strip() not in MOVES:
                return 0.0
            position, reward, over, _, _ = env.step(MOVES[text.strip()])
            if over:
                return float(reward)
    return 0.0
