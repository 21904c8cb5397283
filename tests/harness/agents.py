"""Agents for tests: the openai SDK in an episode, and agents that stream until an event stops them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from headgate.types import EpisodeOpened
from tests.harness.barrier import arrived, hold_after
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import LONG_S

ONE_CALL = """
import json, os, urllib.request
body = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""
"""The part of a program by which an agent samples a token."""


async def one_call(base_url: str, api_key: str) -> None:
    """Sample a token, as an agent that is a function."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=LONG_S) as client:
        await client.chat.completions.create(
            model="any", max_tokens=1, messages=[{"role": "user", "content": "hi"}]
        )


@asynccontextmanager
async def client_of(gateway: RunningGateway, **kwargs: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, str]]:
    """Yield the openai SDK as an agent would use it, in a new episode; and the episode's id."""
    opened = await gateway.admin.open_episode("task", **kwargs)
    async with sdk(opened) as client:
        yield client, opened.episode_id


def sdk(opened: EpisodeOpened, max_retries: int = 0) -> openai.AsyncOpenAI:
    """Return the SDK in an episode. Its default limit of 5 s for a connection is too short on a busy machine."""
    url, key = opened.base_url, opened.api_key
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=max_retries, timeout=LONG_S)


async def agent(gateway: RunningGateway, done: asyncio.Event, number: int) -> tuple[str, list[int]]:
    """Streams one reply after the other until `done`; returns how many tokens it got in each."""
    counts: list[int] = []
    async with client_of(gateway, mode="eval") as (client, episode):
        while not done.is_set():
            question: Any = {"role": "user", "content": f"agent {number}, call {len(counts)}"}
            stream = await client.chat.completions.create(
                model="m", messages=[question], stream=True, logprobs=True, max_tokens=60
            )
            choices = [choice async for chunk in stream for choice in chunk.choices]
            assert choices[-1].finish_reason in ("stop", "length")
            counts.append(sum(len(c.logprobs.content or []) for c in choices if c.logprobs))
    return episode, counts


async def finished(agents: list[asyncio.Task[Any]], done: asyncio.Event) -> list[Any]:
    """Let every agent end with its reply; return what they got."""
    done.set()
    return list(await asyncio.gather(*agents))


def start_agents(gateway: RunningGateway, count: int) -> tuple[list[asyncio.Task[Any]], asyncio.Event]:
    """Start agents that stream until the event is set; one that fails ends the waiting for others (`barrier.arrived`)."""
    done = asyncio.Event()
    tasks = [asyncio.create_task(agent(gateway, done, i), name=f"agent-{i}") for i in range(count)]
    gateway.agents += tasks
    return tasks, done


async def start_held(
    gateway: RunningGateway, count: int, tokens: int
) -> tuple[list[asyncio.Task[Any]], asyncio.Event]:
    """Start agents, and wait until the reply of each is held in an engine after `tokens` tokens."""
    await hold_after(gateway, tokens)
    agents, done = start_agents(gateway, count)
    await arrived(gateway, count)
    return agents, done
