"""Processes whose clocks are apart agree on what came first, and on what is over: a process with a shifted clock writes, and
this one judges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.config import (
    FeedSettings,
    RetentionSettings,
    StoreSettings,
)
from gateway.episodes import retention
from gateway.store import clock, decisions, episodes, turns
from gateway.store.database import Database
from gateway.store.decisions import Decision
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import StoredLedger
from headgate.errors import Conflict
from tests.harness.forks import run_to_end
from tests.unit.gateway.store.rows import (
    MINE,
    NAME,
    episode,
    leases_of,
    record,
    turn,
)

shared = pytest.mark.parametrize("new_store", ["postgresql"], indirect=True)
"""For stores that processes of several hosts share: whoever shares a file of SQLite has its clock, too."""
HOUR = 3600.0
TICK_S = 0.01
"""More than a database rounds a moment by."""
Work = Callable[[Database], Coroutine[Any, Any, object]]


def elsewhere(url: str, apart_s: float, work: Work) -> None:
    """Runs `work` on the store in another process, by whose clocks it is `apart_s` later than it is."""
    assert run_to_end(_shifted, url, apart_s, work) == 0


def _shifted(url: str, apart_s: float, work: Work) -> None:
    wall, steady = time.time, time.monotonic
    time.time = lambda: wall() + apart_s  # type: ignore[method-assign]
    time.monotonic = lambda: steady() + abs(apart_s)  # type: ignore[method-assign]

    async def run() -> None:
        database = await Database.open(StoreSettings(url=url))
        await work(database)
        await database.close()

    asyncio.run(run())


@pytest.fixture
async def database(store_url: str) -> Any:
    opened = await Database.open(StoreSettings(url=store_url))
    yield opened
    await opened.close()


@pytest.fixture(params=[-HOUR, HOUR], ids=["behind", "ahead"])
def apart_s(request: pytest.FixtureRequest) -> float:
    """The offset of the other process's clocks in seconds."""
    return float(request.param)


async def _begin_again(database: Database) -> None:
    await database.submit(lambda c: turns.restart(c, "e", NAME, "retry"))


@shared
async def test_a_retry_of_another_host_comes_after_the_call_and_before_the_next(
    database: Database, store_url: str, apart_s: float
) -> None:
    await database.submit(lambda c: episodes.insert_episode(c, episode("e")))
    await asyncio.to_thread(elsewhere, store_url, apart_s, _begin_again)
    with pytest.raises(Conflict) as error:
        await record(database, *turn("first"))
    assert error.value.code == "requested_again"
    await record(database, *turn("asked afterwards"), ago_s=-1.0)


async def _lease(database: Database) -> None:
    leases = await leases_of(database, await StoredLedger.load(database, MINE, "m"))
    await leases.lease("trainer")


@shared
async def test_a_lease_lasts_as_long_as_it_was_given_for(
    database: Database, store_url: str, apart_s: float
) -> None:
    await asyncio.to_thread(elsewhere, store_url, apart_s, _lease)
    ledger = await StoredLedger.load(database, MINE, "m")
    given = await leases_of(database, ledger)
    settings = FeedSettings(lease_s=2 * HOUR)
    held = (await Leases.load(database, ledger, settings, given._reader)).current()
    assert held is not None and 900.0 < held["left_s"] <= 1000.0


async def _end(database: Database) -> None:
    def write(connection: Any) -> None:
        episodes.insert_episode(connection, episode("e") | {"mode": "eval"})
        episodes.close_episode(connection, "e", {"state": "closed", "reason": "rewarded"})
        decisions.insert_decisions(connection, "m", [Decision("refused", "g", "gone", "full")])

    await database.submit(write)


@shared
async def test_episodes_are_as_old_as_they_are(database: Database, store_url: str, apart_s: float) -> None:
    """One that ended just now is not deleted because the clocks of the hosts say something else of it, and not kept either."""
    await asyncio.to_thread(elsewhere, store_url, apart_s, _end)
    day = RetentionSettings(keep_days=0.5 * HOUR / 86_400)
    await retention.tend(database, day)
    assert await database.read(lambda c: episodes.stored(c, ["e"])) == {"e"}
    assert [row["kind"] for row in await database.read(lambda c: decisions.of_episode(c, "gone"))] == [
        "refused"
    ]
    await database.submit(lambda c: c.exec_driver_sql(f"UPDATE episodes SET closed_at = closed_at - {HOUR}"))
    await retention.tend(database, day)
    assert await database.read(lambda c: episodes.stored(c, ["e"])) == set()


async def test_the_clock_is_that_of_the_moment(database: Database) -> None:
    """The time is not that of the transaction's start: the transaction may have waited for a lock since."""

    def twice(connection: Any) -> tuple[float, float]:
        before = clock.now(connection)
        while (after := clock.now(connection)) == before:
            pass
        return before, after

    began = time.time()
    before, after = await database.submit(twice)
    assert began - TICK_S < before < after < time.time() + TICK_S
