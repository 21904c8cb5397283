"""The parts that `gateway doctor` examines. None changes anything, and none needs the gateway to run."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.config.settings import ConfigError, Settings
from gateway.doctor import Finding, engines, machine

log = logging.getLogger(__name__)

CHECKS: dict[str, Callable[[Settings], Awaitable[list[Finding]]]] = {
    "checkpoints and templates": engines.examine_models,
    "engines": engines.examine_engines,
    "database": machine.examine_database,
    "bus": machine.examine_bus,
    "address": machine.examine_address,
    "disk": machine.examine_disk,
    "limits": machine.examine_limits,
    "traces": machine.examine_collector,
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
