"""A duel: two models sample one character each without seeing the other's, and the later one in Unicode's order wins.

    gateway episodes match --agent examples/self_play/duel.py:play --tasks examples/self_play/tasks.jsonl \
        --players first=red,second=blue --forever

The rewards of a match add up to 1, so what one model learns costs the other: both learn, and the mean stays a half.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from headgate.client.matches import Player


async def play(task: dict[str, Any], players: dict[str, Player]) -> dict[str, Any]:
    """Play one match; the component `character` is the number of what each model sampled."""
    sampled = await asyncio.gather(*(sample(task, player) for player in players.values()))
    characters = dict(zip(players, sampled, strict=True))
    first, second = (characters[player] for player in players)
    won = 0.5 if first == second else float(first > second)
    rewards = dict(zip(players, (won, 1.0 - won), strict=True))
    return {
        player: {"reward": rewards[player], "components": {"character": float(characters[player])}}
        for player in players
    }


async def sample(task: dict[str, Any], player: Player) -> int:
    """Return the number of the character that a model samples; -1 if its reply is empty."""
    async with httpx.AsyncClient(timeout=300.0) as http:
        response = await http.post(
            f"{player.base_url}/chat/completions",
            json={
                "model": "player",
                "max_tokens": 1,
                "messages": [{"role": "user", "content": task["question"]}],
            },
            headers={"Authorization": f"Bearer {player.api_key}"},
        )
    text = response.raise_for_status().json()["choices"][0]["message"]["content"] or ""
    return ord(text[0]) if text else -1
