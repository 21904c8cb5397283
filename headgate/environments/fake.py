"""An environment without a package: it requests a text, and the reward is a share of the reply's characters.

For tests, and to try `--env` with. `NAME` is the character. `fails`: every N-th episode fails (0: none).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headgate.environments.base import (
    Found,
    Played,
    PlayFailed,
)
from headgate.environments.chat import Chat, text_of


class FakeEnvironment:
    """`size` tasks; the reward of each is the share of the character `name` in the model's reply."""

    def __init__(self, name: str, size: int = 32, fails: int = 0, max_tokens: int = 8) -> None:
        self._character = name
        self._size = size
        self._fails = fails
        self._max_tokens = max_tokens
        self._played = 0
        self._chat = Chat()

    def tasks(self) -> Iterator[Found]:
        for number in range(self._size):
            yield Found(str(number), {"question": f"Write {self._character!r}, {number} times."})

    async def open(self) -> None:
        await self._chat.open()

    async def play(self, data: dict[str, Any], base_url: str, api_key: str) -> Played:
        self._played += 1
        reply = await self._chat.complete(
            base_url,
            api_key,
            messages=[{"role": "user", "content": data["question"]}],
            max_tokens=self._max_tokens,
        )
        if self._fails and self._played % self._fails == 0:
            raise PlayFailed("the fake tool server is down", "tool_failed")
        text = text_of(reply)
        earned = text.count(self._character) / max(1, len(text))
        return Played(earned, {"characters": float(len(text))}, {reply["id"]: earned})

    async def close(self) -> None:
        await self._chat.close()
