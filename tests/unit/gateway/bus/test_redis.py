"""A Redis server that goes away, comes back, or forgets everything."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from gateway.bus.base import Bus
from gateway.bus.opening import open_bus
from gateway.config import BusSettings
from headgate.errors import BusUnavailable
from tests.harness.servers import RedisServer, redis_server
from tests.harness.waiting import turns, until, within
from tests.unit.gateway.bus.calls import BEGUN, A, goes_on, only


@pytest.fixture
async def own() -> AsyncIterator[tuple[RedisServer, Bus]]:
    """Yield a server that the test may stop, and a bus in it."""
    with redis_server() as server:
        bus = open_bus(BusSettings(url=server.url, timeout_s=10.0))
        yield server, bus
        await bus.close()


HURRIED = BusSettings(timeout_s=0.5)
"""The settings for a bus whose server is silent, so that nothing waits long for it."""


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


async def back(bus: Bus) -> bool:
    try:
        await bus.announce(A)
    except BusUnavailable:
        return False
    return True


async def test_a_cancellation_ends_a_task_that_writes_without_pause_whenever_it_comes(
    own: tuple[RedisServer, Bus],
) -> None:
    """One that was lost left a gateway process waiting for its own tasks for ever when it was stopped."""
    _, bus = own

    async def write() -> None:
        while True:
            await bus.put("key", b"value", 60.0)

    for turn in range(100):
        writing = asyncio.create_task(write())
        await turns(turn)
        writing.cancel()
        async with within(f"a task that is cancelled in its turn {turn} ends"):
            await asyncio.wait({writing})
        assert writing.cancelled()


@pytest.mark.parametrize("how", ["stopped", "silent"])
async def test_an_outage_is_logged_once_and_costs_little(
    own: tuple[RedisServer, Bus], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    server, bus = own
    caplog.set_level(logging.INFO)
    await bus.announce(A)
    if how == "stopped":
        await asyncio.to_thread(server.stop)
    else:
        server.pause(True)
        monkeypatch.setattr(bus, "_settings", HURRIED)
    with pytest.raises(BusUnavailable):
        await bus.write(A, [BEGUN])
    async with within(
        "500 operations have failed quickly", 200.0
    ):  # each for itself would take 500 times `timeout_s`
        for _ in range(500):
            with pytest.raises(BusUnavailable):
                await bus.find("place")
    monkeypatch.undo()
    assert bus.unbroken_s < 60
    assert len(warnings(caplog)) == 1
    if how == "stopped":
        await asyncio.to_thread(server.start)
    else:
        server.pause(False)
    await until(lambda: back(bus), "it is used again")
    assert [r.message for r in caplog.records][-1] == "the bus can be reached again"
    assert await bus.write(A, [BEGUN]) == ["written"]


async def test_a_pause_of_this_process_is_no_outage_of_the_bus(
    own: tuple[RedisServer, Bus], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, bus = own
    await bus.announce(A)
    server.pause(True)
    with monkeypatch.context() as patched:
        clock = itertools.count(0.0, 1.6)  # not much beyond the limit: others may count it as dead by then
        patched.setattr(bus, "_settings", HURRIED.model_copy(update={"timeout_s": 1.0}))
        patched.setattr("gateway.bus.redis.time", SimpleNamespace(monotonic=lambda: next(clock)))
        with pytest.raises(BusUnavailable) as error:
            await bus.write(A, [BEGUN])
    server.pause(False)
    assert error.value.stood_still and warnings(caplog) == []
    assert await bus.write(A, [BEGUN]) == ["written"]


async def test_after_a_flush_a_log_is_gone_and_can_be_begun_again(own: tuple[RedisServer, Bus]) -> None:
    server, bus = own
    await bus.write(A, [BEGUN])
    await asyncio.to_thread(server.flush)
    assert await bus.write(A, [goes_on(4, b"x")]) == ["gone"]
    assert await bus.write(A, [BEGUN]) == ["written"]
    assert (await only(bus)).url == "http://a", (
        "never a log of a process that lives, and does not count as alive"
    )


async def test_who_listens_hears_of_a_gap(own: tuple[RedisServer, Bus]) -> None:
    server, bus = own
    async with aclosing(bus.listen("ledger")) as news:
        assert await anext(news) == ("ledger", b"")
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        assert await anext(news) == ("ledger", b""), "something may have been missed"
        await until(lambda: back(bus), "it is used again")
        await bus.publish("ledger", b"7")
        assert await anext(news) == ("ledger", b"7")


async def test_a_listener_that_the_server_drops_is_no_outage(
    own: tuple[RedisServer, Bus], caplog: pytest.LogCaptureFixture
) -> None:
    """As it does with one that stood still while much was published. Operations would fail for half a second else."""
    server, bus = own
    async with aclosing(bus.listen("ledger")) as news, Redis.from_url(server.url) as other:
        assert await anext(news) == ("ledger", b"")
        assert await other.client_kill_filter(_type="pubsub") == 1
        again = asyncio.ensure_future(anext(news))
        await until(
            lambda: bus.unbroken_s < 60, "it has noticed: another process may have shown what is not logged"
        )
        assert await bus.write(A, [BEGUN]) == ["written"]
        assert await again == ("ledger", b"")
    assert len(warnings(caplog)) == 1 and "may be lost" in warnings(caplog)[0]
