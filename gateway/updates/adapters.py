"""Versions that are adapters on top of the first version's weights: `[engine] transport = "lora"`.

An engine runs several adapters concurrently; the name of each is derived from its bytes. A request is sampled to its end by the
adapter with which it began, and no engine is paused. Invariants: an engine has at most `[engine] max_loras` adapters, and none is
unloaded that a request of this gateway uses; no request runs under the engine's own weights while there is an adapter, because
vLLM's CPU build applies the last adapter to requests without one.
"""

from __future__ import annotations

import asyncio

from gateway.generation.slot import Slot
from gateway.updates.weights_check import Weights
from headgate.errors import EngineError

_RETRY_S = 0.2


async def load_adapter(slot: Slot, weights: Weights, path: str, max_adapters: int) -> None:
    """Load a version's adapter; first unload the oldest ones if the engine has `max_adapters` of them. Raise EngineError.

    The requests of the oldest adapters are given back and continue under a newer one; those that cannot move are waited for.
    The same holds for requests under the engine's own weights before the first adapter, for which the engine must be held.
    """
    engine = slot.engine
    if engine is None:
        raise EngineError(f"{slot.name} has no engine")
    if not slot.adapter:
        await _vacate(slot, slot.version)
    others = [version for version in slot.adapters if version != weights.version]
    for version in sorted(others)[: max(0, len(others) - max_adapters + 1)]:
        await _vacate(slot, version)
        await engine.unload_adapter(slot.adapters[version])
        del slot.adapters[version]
    await engine.load_adapter(weights.adapter, path)
    slot.adapters[weights.version] = weights.adapter


async def _vacate(slot: Slot, version: int) -> None:
    """Abort the requests that run under a version until none is left, including those that have just begun."""
    while slot.runs_under(version) and slot.engine is not None:
        await slot.engine.abort(slot.movable(version))
        try:
            async with asyncio.timeout(_RETRY_S):
                await slot.ended()
        except TimeoutError:
            continue
