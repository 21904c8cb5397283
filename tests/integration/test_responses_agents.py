"""Stored responses under an agent's key: they identify the episode, and are reached in all of the agent's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.harness.responses import Scripted, create, one_path, streamed
from tests.harness.scripted import scripted_gateway
from tests.harness.waiting import LONG_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = {name: f"the-key-of-{name}-alone" for name in ("ann", "bob")}
Clients = dict[str, openai.AsyncOpenAI]


@pytest.fixture(scope="module")
async def scripted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scripted]:
    agents = {name: {"key": key} for name, key in KEYS.items()}
    work = tmp_path_factory.mktemp("agents")
    async with scripted_gateway(tiny_model, work, agents=agents) as both:
        yield both


@pytest.fixture(scope="module")
async def clients(scripted: Scripted) -> AsyncIterator[Clients]:
    async with AsyncExitStack() as stack:
        url = f"{scripted[0].url}/v1"
        yield {
            name: await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=LONG_S)
            )
            for name, key in KEYS.items()
        }


async def episode_of(scripted: Scripted, response_id: str) -> str:
    """The episode that has a call of this id."""
    for row in await scripted[0].admin.episodes():
        if response_id in [call["id"] for call in (await scripted[0].admin.episode(row["id"]))["calls"]]:
            return row["id"]
    raise AssertionError(f"no episode has {response_id}")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chain_belongs_to_the_episode_in_which_it_began(
    scripted: Scripted, clients: Clients, stream: bool
) -> None:
    gateway, engine = scripted
    chains: list[Any] = [None, None]
    for turn in range(3):
        for i in range(2):  # equal input in both, so that only the continued response distinguishes them
            engine.replies.append("the same")
            previous = chains[i].id if chains[i] else None
            send = streamed if stream else create
            response = await send(clients["ann"], f"turn {turn}", previous_response_id=previous)
            chains[i] = response[-1].response if stream else response
    episodes = [await episode_of(scripted, response.id) for response in chains]
    assert episodes[0] != episodes[1]
    for episode in episodes:
        await one_path(gateway, episode, turns=3)


async def test_an_agent_reaches_only_its_own_responses(scripted: Scripted, clients: Clients) -> None:
    engine = scripted[1]
    ann, bob = clients["ann"], clients["bob"]
    engine.replies += ["a", "b"]
    response = await create(ann, "mine")
    completion = await ann.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
    assert (await ann.responses.retrieve(response.id)).output_text == "a"
    for work in (
        bob.responses.retrieve(response.id),
        bob.responses.delete(response.id),
        create(bob, "x", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await work
    other = {"x-headgate-episode": await episode_of(scripted, completion.id)}
    with pytest.raises(openai.NotFoundError):
        await create(ann, "x", previous_response_id=response.id, extra_headers=other)


async def test_a_response_outlives_its_episode_and_is_not_continued(
    scripted: Scripted, clients: Clients
) -> None:
    gateway, engine = scripted
    engine.replies += ["a"]
    response = await create(clients["bob"], "short")
    await gateway.admin.abandon(await episode_of(scripted, response.id), "enough")
    assert await clients["bob"].responses.retrieve(response.id) == response
    with pytest.raises(openai.ConflictError):
        await create(clients["bob"], "x", previous_response_id=response.id)
    await clients["bob"].responses.delete(response.id)
