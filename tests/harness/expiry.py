"""Ends what a dead process holds for a while yet, as time would: its lease in PostgreSQL, its sign of life in Redis.

So tests give leases far longer than they run, and no process loses one because the machine is slow.
"""

from __future__ import annotations

from secrets import token_hex
from typing import Any

import psycopg
from redis import Redis

from gateway.config import BusSettings
from tests.harness.servers import RedisServer

LEASE_S = 300.0
"""The longest time that the settings allow."""
_OVERDUE = "UPDATE coordinator SET deadline = extract(epoch FROM clock_timestamp()) - 1 WHERE holder LIKE %s"


def patient_bus(redis: RedisServer, **given: Any) -> dict[str, Any]:
    """Return settings of a bus with its own prefix, whose operations and processes may be slow without counting as dead."""
    return {"url": redis.url, "prefix": token_hex(4), "timeout_s": 10.0, "heartbeat_ttl_s": 60.0, **given}


def end_lease(store: str, pid: int) -> None:
    """End the lease of a dead coordinator; do nothing if the process was none."""
    with psycopg.connect(store) as connection:
        connection.execute(_OVERDUE, [f"%-{pid}-%"])


def lives(bus: BusSettings, pid: int) -> bool:
    """Return whether a process counts as alive on the bus."""
    with Redis.from_url(bus.url) as redis:
        return any(redis.scan_iter(f"{bus.prefix}:process:*-{pid}-*"))


def end_life(bus: BusSettings, pid: int) -> None:
    """Let a process count as dead on the bus."""
    with Redis.from_url(bus.url) as redis:
        gone = list(redis.scan_iter(f"{bus.prefix}:process:*-{pid}-*"))
        assert len(gone) <= 1, f"{gone} is not one process"
        if gone:  # the bus may have forgotten it by itself
            redis.delete(*gone)
