"""One bus of each kind, by the settings that a test wants; a second connection to the same one stands for another process."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gateway.bus.base import Bus
from gateway.bus.memory import MemoryBus
from gateway.bus.opening import open_bus
from gateway.config import BusSettings
from tests.harness.servers import RedisServer, redis_server

Connect = Callable[..., Bus]


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """Yield a Redis server that the tests of one folder share: each takes a prefix of its own, and none stops it."""
    with redis_server() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Make connections to one bus; the first one's settings count."""
    opened: list[Bus] = []
    prefix = secrets.token_hex(4)

    def connect(**settings: float) -> Bus:
        if request.param == "redis":
            url = request.getfixturevalue("redis").url
            opened.append(
                open_bus(
                    BusSettings.model_validate({"url": url, "prefix": prefix, "timeout_s": 10, **settings})
                )
            )
        elif not opened:
            opened.append(MemoryBus(BusSettings.model_validate(settings), shared=True))
        return opened[-1]

    yield connect
    for bus in opened:
        await bus.close()
