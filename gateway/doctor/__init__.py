"""`gateway doctor`: examines whatever a configuration names, before or while a gateway runs on it, and says how to mend
it.

Each module examines one part and returns findings; none changes anything, and none needs the gateway to run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.doctor import engines, host, models, stores, telemetry
from gateway.doctor.finding import Finding
from gateway.settings import Settings

__all__ = ["CHECKS", "Finding", "examine"]

CHECKS: dict[str, Callable[[Settings], Awaitable[list[Finding]]]] = {
    "checkpoints and templates": models.examine,
    "engines": engines.examine,
    "database": stores.examine_database,
    "bus": stores.examine_bus,
    "disk": host.examine_disk,
    "limits": host.examine_limits,
    "traces": telemetry.examine,
}
"""The parts, in the order in which they are examined."""


async def examine(settings: Settings) -> AsyncIterator[tuple[str, list[Finding]]]:
    """The findings of each part of CHECKS, as soon as it has been examined."""
    for part, check in CHECKS.items():
        yield part, await check(settings)
