"""The users of a live agent: they ask, and most of them let it know what they think of the reply.

They know a URL and a key, and nothing of training. A quarter press a button (`POST /v1/feedback`), some of them late, half write
a second message, the rest leave; one in ten does not agree to training. A user whose gateway was killed repeats the request
until it is served.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from examples.demo.agent import MODEL
from examples.demo.tasks import score, tasks

THANKS, NO = "1", "0"
"""What users write after a right and after a wrong reply, in words that the demo's model has seen."""
USERS = 48
_PATIENCE_S = 600.0
_LATE_S = 3.0
"""The longest that a user thinks before pressing the button."""


def satisfied(episode: dict[str, Any]) -> dict[str, float | None]:
    """Grade a conversation by the user's second message; without one, have no opinion."""
    answers = [turn["next_text"] for turn in episode["turns"] if turn["next_text"]]
    return {"reward": float(THANKS in answers[-1]) if answers else None}


@dataclass
class Users:
    """Users who talk to the agent at `url` (the gateway's root) until they are stopped."""

    url: str
    key: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    """Conversations by how they went on."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests by their errors."""

    async def talk(self) -> None:
        """Talk until this is cancelled."""
        questions = itertools.chain.from_iterable(tasks("train", seed) for seed in itertools.count(self.seed))
        async with (
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=100) as client,
            httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(USERS):
                rng = random.Random(f"{self.seed} {number}")
                group.create_task(self._user(questions, rng, client, http), name=f"user-{number}")

    async def _user(
        self,
        questions: Iterator[dict[str, Any]],
        rng: random.Random,
        client: openai.AsyncOpenAI,
        http: httpx.AsyncClient,
    ) -> None:
        for task in questions:
            try:
                await self._conversation(task, rng, client, http)
            except (openai.APIError, httpx.HTTPError) as error:
                self.failures[f"{type(error).__name__}: {error}"] += 1

    async def _conversation(
        self, task: dict[str, Any], rng: random.Random, client: openai.AsyncOpenAI, http: httpx.AsyncClient
    ) -> None:
        headers = {"X-Headgate-Train": "no"} if rng.random() < 0.1 else {}
        talk: list[Any] = [{"role": "user", "content": task["question"]}]
        reply = await client.chat.completions.create(
            model=MODEL, messages=talk, temperature=0, max_tokens=16, extra_headers=headers
        )
        text = reply.choices[0].message.content or ""
        right = score(task, text) == 1.0
        way = rng.choices(["button", "message", "silent"], [1, 2, 1])[0]
        self.counts[way] += 1
        if way == "button":
            await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, _LATE_S)]))
            await _press(http, {"id": reply.id, "reward": float(right)})
        elif way == "message":
            talk += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": THANKS if right else NO},
            ]
            await client.chat.completions.create(
                model=MODEL, messages=talk, temperature=0, max_tokens=1, extra_headers=headers
            )


async def _press(http: httpx.AsyncClient, feedback: dict[str, Any]) -> None:
    """Post feedback, again while no gateway is there."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            response = await http.post("/v1/feedback", json=feedback)
        except httpx.TransportError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
            continue
        if response.status_code == 503 and time.monotonic() < until:
            await asyncio.sleep(0.5)
            continue
        response.raise_for_status()
        return
