"""Agents for the trainer's tests: they send one question after the other, and compute the reward from the text of the reply."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from headgate.client import EpisodeRunner, Task
from headgate.client.agents import FunctionAgent
from tests.harness.gateways import RunningGateway
from tests.harness.scheduler_process import RunningCluster
from tests.harness.waiting import LONG_S


@asynccontextmanager
async def episodes(
    gateway: RunningGateway | RunningCluster,
    model: str | None = None,
    open_wait_s: float = 0.5,
    content: Callable[[str], Any] = str,
) -> AsyncIterator[None]:
    """Groups of two episodes without end; the reward is a checksum of the reply. `content` makes a message's content of
    a question.

    Every prompt has a length of its own, because a fake engine gives prompts of one length the same reply, and equal rewards
    teach nothing.
    """
    number = itertools.count()

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        body = {
            "model": model or "any",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": content(task["q"] + "!" * (next(number) % 32))}],
        }
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=LONG_S) as http:
            response = (await http.post("chat/completions", json=body)).raise_for_status().json()
        text = response["choices"][0]["message"]["content"] or ""
        return zlib.crc32(text.encode()) / 2**32

    agent = FunctionAgent(solve)
    runner = EpisodeRunner(
        gateway.admin, agent, group_size=2, concurrency=8, open_wait_s=open_wait_s, model=model
    )
    stop = asyncio.Event()
    tasks = [Task(f"t{i}", {"q": f"question {i}"}) for i in range(50)]
    work = asyncio.create_task(runner.run_forever(tasks, stop), name="episodes")
    try:
        yield
    finally:
        stop.set()
        await work


async def broken(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Always fails."""
    raise ValueError("boom")
