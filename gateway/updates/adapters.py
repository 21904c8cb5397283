"""Versions that are adapters on top of the first version's weights: `[engine] transport = "lora"`.

An engine runs several concurrently, each under a name that stands for its bytes. A request is sampled to its end by the
adapter with which it began, and nothing pauses. Invariants: an engine has at most `[engine] max_loras` adapters, and none is
taken away that a request of this gateway uses; no request runs under the engine's own weights while there is an adapter, because
vLLM's CPU build puts the last adapter on requests without one.
"""

from __future__ import annotations

import asyncio

from gateway.generation.slot import Slot
from gateway.updates.weights_check import Weights
from headgate.errors import EngineError

_RETRY_S = 0.2


async def load_adapter(slot: Slot, weights: Weights, path: str, most: int) -> None:
    """Load a version's adapter; before that takes the oldest away, if the engine has `most` of them. Raise EngineError.

    The requests of the oldest are given back and go on under a newer one. Those that cannot move are waited for. So are the
    requests of the engine's own weights before the first adapter comes, for which the engine has to be held.
    """
    engine = slot.engine
    if engine is None:
        raise EngineError(f"{slot.name} has no engine")
    if not slot.adapter:
        await _vacate(slot, slot.version)
    others = [version for version in slot.adapters if version != weights.version]
    for version in sorted(others)[: max(0, len(others) - most + 1)]:
        await _vacate(slot, version)
        await engine.unload_adapter(slot.adapters[version])
        del slot.adapters[version]
    await engine.load_adapter(weights.adapter, path)
    slot.adapters[weights.version] = weights.adapter


async def _vacate(slot: Slot, version: int) -> None:
    """Wait until no request runs under a version. One that was on its way is given back when it has arrived."""
    while slot.runs_under(version) and slot.engine is not None:
        await slot.engine.abort(slot.movable(version))
        try:
            async with asyncio.timeout(_RETRY_S):
                await slot.ended()
        except TimeoutError:
            continue
