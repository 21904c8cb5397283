"""Opens the bus that a URL names. A new one is one module in this package and one line here."""

from __future__ import annotations

from collections.abc import Callable

from gateway.bus.base import Bus
from gateway.bus.memory import MemoryBus
from gateway.config import BusSettings


def _redis(settings: BusSettings) -> Bus:
    from gateway.bus.redis import RedisBus  # a process without Redis needs no client of it

    return RedisBus(settings)


_SCHEMES: dict[str, Callable[[BusSettings], Bus]] = {
    "memory": MemoryBus,
    "redis": _redis,
    "rediss": _redis,
    "unix": _redis,
}


def open_bus(settings: BusSettings) -> Bus:
    """Return a bus by the scheme of its URL. Connects at its first operation; close it with `close`."""
    return _SCHEMES[settings.url.partition("://")[0]](settings)
