"""Requests as SDKs send them again, streams that are dropped, and the turns that they leave."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from gateway.api.v1.generation import WHOLE_INTERVAL
from gateway.engines.fake import identity, next_token
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.gateways import RunningGateway
from tests.harness.records import STOP_TOKENS, nodes_of
from tests.harness.waiting import until

RETRY = {"x-stainless-retry-count": "1"}


def lasting(gateway: RunningGateway, seed: int | None = None) -> dict[str, Any]:
    """Return a request whose reply takes 40 to 80 tokens: the fake engine is a function, so that can be known."""
    weights = identity(str(gateway.settings.model.path.resolve()))
    for number in range(1, 200):
        message = {"role": "user", "content": "why" * number}
        context = gateway.model.renderer.render([message], [])
        length = 0
        while length <= 80 and context[-1] not in STOP_TOKENS[:1] * bool(length):
            context.append(next_token(weights, context, seed, STOP_TOKENS)[0])
            length += 1
        if 40 <= length <= 80:
            return {"model": "m", "messages": [message], "seed": seed}
    raise AssertionError("no such question")


async def turns_of(gateway: RunningGateway, episode: str) -> list[dict[str, Any]]:
    return [node for node in await nodes_of(gateway, episode) if node["sampled"]]


async def stops(gateway: RunningGateway) -> None:
    await until(lambda: gateway.engine.running == 0, "the engine stops")


async def send(
    gateway: RunningGateway, headers: dict[str, str], body: dict[str, Any], **more: str
) -> httpx.Response:
    return await gateway.http.post("/v1/chat/completions", json=body, headers={**headers, **more})


async def drop(gateway: RunningGateway, headers: dict[str, str], body: dict[str, Any], tokens: int) -> None:
    """Send a request that is not streamed, and break the connection when the engine has sampled `tokens` tokens of it."""
    await hold_after(gateway, tokens)
    call = asyncio.create_task(send(gateway, headers, body), name="dropped")
    await arrived(gateway, 1)
    await taken(gateway, tokens - tokens % WHOLE_INTERVAL)
    call.cancel()
    await stops(gateway)
    await release(gateway)


async def taken(gateway: RunningGateway, tokens: int) -> None:
    """Wait until the gateway has `tokens` tokens of its only call."""
    (call,) = gateway.model.pool.calls.values()
    await until(lambda: len(call.turn.ids) == tokens, f"the gateway has {tokens} tokens")
