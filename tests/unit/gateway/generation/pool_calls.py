"""Engines and calls for tests of a pool, without a gateway around it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from gateway.generation.call import Call
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Run, Slot
from headgate.types import Sampling


def opened(pool: EnginePool, name: str, version: int = 0) -> Slot:
    """Return an engine that is open, of which the pool has heard."""
    slot = pool.slots.setdefault(name, Slot(name))
    slot.hold()
    slot.confirm(version)
    pool.notify()
    return slot


def call(name: str, version: int = 0, **sampling: Any) -> Call:
    """Ten tokens, in an episode of its own."""
    prompt = np.arange(10, dtype=np.int32)
    return Call(name, prompt, Sampling(**sampling), episode_id=f"of-{name}", min_version=version)


def inside(slot: Slot, *calls: Call) -> None:
    """Register the calls as running in the slot."""
    for one in calls:
        slot.runs[one.call_id] = Run(one, slot, one.call_id, 0.0)


def asks(pool: EnginePool, one: Call) -> asyncio.Task[Slot]:
    """Return a call that waits for its engine."""
    return asyncio.create_task(pool.acquire(one), name=one.call_id)
