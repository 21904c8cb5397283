"""Requests held at the barrier of fake engines: who acts then knows what runs, on any machine."""

from __future__ import annotations

from typing import Any

from tests.harness.gateways import RunningGateway, slots
from tests.harness.waiting import until


async def hold_after(gateway: RunningGateway, tokens: int, *engines: Any) -> None:
    """Stop requests in these engines (default: all) when they have sampled `tokens` tokens; those before that continue."""
    for slot in engines or slots(gateway):
        await gateway.fake("faults", slot, hold_after=tokens)


async def release(gateway: RunningGateway, *engines: Any) -> None:
    """Take the barrier away."""
    for slot in engines or slots(gateway):
        await gateway.fake("faults", slot, hold_after=None)


async def held(gateway: RunningGateway, *engines: Any) -> int:
    """Count requests at the barrier; an engine that does not run has none."""
    running = [slot for slot in engines or slots(gateway) if slot.url]
    return sum([(await gateway.fake("state", slot))["held"] for slot in running])


async def share(gateway: RunningGateway, requests: int, crowded: Any, other: Any) -> None:
    """Let calls of one engine end until the other has some of those that follow; then hold all at the barrier."""
    await hold_after(gateway, 2, other)
    await release(gateway, crowded)
    await until(lambda: other.streams >= 2, f"{other.name} has calls")
    await hold_after(gateway, 2, crowded)
    await arrived(gateway, requests, crowded, other)


async def arrived(gateway: RunningGateway, requests: int, *engines: Any) -> None:
    """Wait until exactly `requests` requests are at the barrier. Raise what an agent has failed with."""

    async def are_there() -> bool:
        for agent in gateway.agents:
            if agent.done() and not agent.cancelled():
                agent.result()
        return await held(gateway, *engines) == requests

    names = [slot.name for slot in engines or slots(gateway)]
    await until(are_there, f"{requests} requests are at the barrier of {names}")
