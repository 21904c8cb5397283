"""A copy of the coordinator's state, written to the bus once a second, for processes without a link to it.

Only people and health checks read it: a process that has lost its coordinator can show the last known state. No decision uses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NotRequired, TypedDict

import orjson

from gateway.bus.base import Bus
from gateway.cluster.hub import FollowerDescription, Hub
from gateway.generation.pool import EnginePool
from gateway.generation.slot import EngineDescription
from headgate.errors import BusUnavailable

TOPIC = "coordinator"
"""Published when a coordinator has started or stopped."""
EVERY_S = 1.0
_KEY, _KEPT_S = "coordinator", 3600.0


class ClusterSnapshot(TypedDict):
    """The state of a cluster, from its coordinator."""

    fence: int
    url: str
    at: float
    followers: list[FollowerDescription]
    engines: list[EngineDescription]
    age_s: NotRequired[float]


def described(fence: int, url: str, hub: Hub, pools: Iterable[EnginePool]) -> ClusterSnapshot:
    """Return the present state."""
    engines: list[EngineDescription] = []
    for pool in pools:
        for engine in pool.describe():
            elsewhere, _ = hub.count_runs(pool.model, engine["name"])
            engines.append({**engine, "streams": engine["streams"] + elsewhere})
    return {"fence": fence, "url": url, "at": time.time(), "followers": hub.describe(), "engines": engines}


async def keep(bus: Bus, values: ClusterSnapshot) -> None:
    """Write a snapshot to the bus, if that is available."""
    try:
        await bus.put(_KEY, orjson.dumps(values), _KEPT_S)
    except BusUnavailable:
        return


async def last(bus: Bus) -> ClusterSnapshot | None:
    """Return the last snapshot, with its age in seconds; None if there is none."""
    try:
        kept = await bus.get(_KEY)
    except BusUnavailable:
        return None
    if kept is None:
        return None
    values: ClusterSnapshot = orjson.loads(kept)
    return {**values, "age_s": round(time.time() - values["at"], 3)}


async def wake(bus: Bus) -> None:
    """Notify the other processes that a coordinator has started or stopped."""
    try:
        await bus.publish(TOPIC)
    except BusUnavailable:
        return
