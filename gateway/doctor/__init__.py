"""`gateway doctor`: examines whatever a configuration names, before or while a gateway runs on it, and says how to mend
it.

Each module examines one part and returns findings; none changes anything, and none needs the gateway to run.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.doctor import engines, host, models, stores, telemetry
from gateway.doctor.finding import Finding
from gateway.settings import ConfigError, Settings

log = logging.getLogger(__name__)

__all__ = ["CHECKS", "Finding", "examine"]

CHECKS: dict[str, Callable[[Settings], Awaitable[list[Finding]]]] = {
    "checkpoints and templates": models.examine,
    "engines": engines.examine,
    "database": stores.examine_database,
    "bus": stores.examine_bus,
    "address": host.examine_address,
    "disk": host.examine_disk,
    "limits": host.examine_limits,
    "traces": telemetry.examine,
}
"""The parts, in the order in which they are examined."""


async def examine(settings: Settings) -> AsyncIterator[tuple[str, list[Finding]]]:
    """Yield the findings of each part of CHECKS, as soon as it has been examined. An error of one part ends no other."""
    for part, check in CHECKS.items():
        try:
            found = await check(settings)
        except ConfigError as error:
            found = [Finding("problem", str(error), "correct the setting that it names")]
        except Exception as error:
            log.debug("%s", part, exc_info=error)
            what = f"it could not be examined: {type(error).__name__}: {error}"
            found = [
                Finding("problem", what, "report this with `gateway --debug doctor`, if the setting is right")
            ]
        yield part, found
