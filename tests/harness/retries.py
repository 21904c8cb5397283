"""Requests as SDKs send them again, streams that are dropped, and the turns that they leave."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from gateway.api.v1.generation import WHOLE_INTERVAL
from tests.harness import records
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.gateways import RunningGateway
from tests.harness.records import nodes_of
from tests.harness.waiting import until

RETRY = {"x-stainless-retry-count": "1"}


def lasting(gateway: RunningGateway, seed: int | None = None) -> dict[str, Any]:
    """Return a request whose reply takes 60 to 120 tokens."""
    messages = records.lasting(gateway.settings.model, seed, gateway.model.renderer)
    return {"model": "m", "messages": messages, "seed": seed}


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
