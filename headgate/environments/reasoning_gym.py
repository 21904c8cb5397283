"""reasoning-gym's procedural datasets: one question, one answer, scored by the dataset's own scorer.

`reasoning-gym:chain_sum`. Arguments: those of the dataset (`size`, its difficulty), and
- `seed`: 1, if none is named;
- `system`: the system prompt, by reasoning-gym's name for it (`default`, `direct`, ...) or as text; empty: none;
- `answer`: `tag` takes the answer from between <answer> and </answer>, as those prompts ask; `whole` takes the reply,
  `last_word` its last word;
- `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from headgate.environments.base import Found, Played
from headgate.environments.chat import Chat, text_of


class ReasoningGymEnvironment:
    """The dataset `name`; `args` are its own."""

    def __init__(
        self,
        name: str,
        system: str = "default",
        answer: Literal["tag", "whole", "last_word"] = "tag",
        max_tokens: int = 1024,
        **args: Any,
    ) -> None:
        self._dataset = reasoning_gym.create_dataset(name, **{"seed": 1, **args})
        self._system = SYSTEM_PROMPTS.get(system, system)
        self._answer = answer
        self._max_tokens = max_tokens
        self._chat = Chat()

    def tasks(self) -> Iterator[Found]:
        for index in range(len(self._dataset)):
            question = self._dataset[index]["question"]
            yield Found(question, {"index": index, "question": question})

    async def open(self) -> None:
        await self._chat.open()

    async def play(self, data: dict[str, Any], base_url: str, api_key: str) -> Played:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": data["question"]})
        reply = await self._chat.complete(base_url, api_key, messages=messages, max_tokens=self._max_tokens)
        entry = self._dataset[data["index"]]
        return Played(float(self._dataset.score_answer(self._found(text_of(reply)), entry)))

    def _found(self, text: str) -> str | None:
        """Return the answer in a reply."""
        if self._answer == "tag":
            found: str | None = extract_answer(text)
            return found
        words = text.split()
        return text.strip() if self._answer == "whole" else (words[-1] if words else None)

    async def close(self) -> None:
        await self._chat.close()
