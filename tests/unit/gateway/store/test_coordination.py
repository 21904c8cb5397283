"""Coordination through the store: one coordinator at a time, growing fencing tokens, and no writes by a deposed one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, text

from gateway.config import StoreSettings
from gateway.store import coordination
from gateway.store.connections import connect
from gateway.store.database import Database
from headgate.errors import Fenced
from tests.harness.servers import PostgresServer
from tests.harness.stores import postgres_store
from tests.harness.waiting import until
from tests.unit.gateway.store.rows import append, numbers

Claim = Callable[[Connection], int | None]


def claim(holder: str, over: int | None, lease_s: float = 1000.0) -> Claim:
    return lambda c: coordination.claim(c, holder, f"http://{holder}", lease_s, over)


async def test_the_first_that_claims_is_the_coordinator(database: Database) -> None:
    assert await database.read(coordination.current) is None
    assert await database.submit(claim("a", 5)) is None
    assert await database.submit(claim("a", 0)) == 1
    assert await database.submit(claim("b", 0)) is None
    seen = await database.read(coordination.current)
    assert seen is not None
    assert (seen.fence, seen.holder, seen.url) == (1, "a", "http://a")
    assert 900 < seen.left_s <= 1000


async def test_a_lease_is_kept_by_renewals_and_ends_with_a_resignation(database: Database) -> None:
    assert await database.submit(claim("a", 0, lease_s=-1.0)) == 1
    await database.submit(lambda c: coordination.renew(c, 1, 1000.0))
    assert await database.submit(claim("b", 1)) is None
    await database.submit(lambda c: coordination.resign(c, 1))
    assert await database.submit(claim("b", 1)) == 2
    with pytest.raises(Fenced):
        await database.submit(lambda c: coordination.renew(c, 1, 1000.0))
    await database.submit(lambda c: coordination.resign(c, 1))
    seen = await database.read(coordination.current)
    assert seen is not None
    assert (seen.fence, seen.holder, seen.left_s > 900) == (2, "b", True)


async def test_a_lease_that_ran_out_is_taken_over_and_only_after_the_fence_that_was_seen(
    database: Database,
) -> None:
    assert await database.submit(claim("a", 0, lease_s=-1.0)) == 1
    assert await database.submit(claim("b", 2)) is None
    assert await database.submit(claim("b", 1, lease_s=-1.0)) == 2
    assert await database.submit(claim("c", 1)) is None
    assert await database.submit(claim("d", None)) == 3
    assert await database.submit(claim("e", None)) == 4


@pytest.mark.parametrize("over", [0, 1])
async def test_of_many_that_claim_at_the_same_moment_one_wins(
    database: Database, store_url: str, over: int
) -> None:
    if over:
        await database.submit(claim("before", 0, lease_s=-1.0))
    engine = connect(store_url, 8)
    together = threading.Barrier(8)

    def one(number: int) -> int | None:
        with engine.connect() as connection:
            together.wait(60)
            with connection.begin():
                return claim(f"p{number}", over)(connection)

    with ThreadPoolExecutor(8) as pool:
        fences = list(await asyncio.to_thread(lambda: list(pool.map(one, range(8)))))
    engine.dispose()
    assert sorted(fence for fence in fences if fence is not None) == [over + 1]
    seen = await database.read(coordination.current)
    assert seen is not None
    assert (seen.fence, seen.holder) == (over + 1, f"p{fences.index(over + 1)}")


async def test_unconditional_claims_get_fences_of_their_own(store_url: str) -> None:
    opened = [await Database.open(StoreSettings(url=store_url)) for _ in range(3)]
    fences = await asyncio.gather(*[one.submit(claim("x", None)) for one in opened for _ in range(5)])
    assert sorted(fence for fence in fences if fence is not None) == list(range(1, 16))
    for one in opened:
        await one.close()


async def test_a_process_that_was_succeeded_writes_no_more_and_others_do(database: Database) -> None:
    fence = await database.submit(claim("a", 0, lease_s=-1.0))
    assert fence == 1
    mine = database.fenced(fence)
    await asyncio.gather(*[mine.submit(append(number)) for number in range(3)])
    submitted = [
        mine.submit(append(3)),
        database.submit(claim("b", 1)),
        mine.submit(append(4)),
        database.submit(append(5)),
        mine.submit(append(6)),
    ]
    outcomes = await asyncio.gather(*submitted, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [int, int, Fenced, int, Fenced]
    assert await database.read(numbers) == [0, 1, 2, 3, 5]
    await database.fenced(2).submit(append(7))
    assert (await database.read(numbers))[-1] == 7


@pytest.mark.usefixtures("idle")
async def test_a_successor_waits_for_a_fenced_transaction_that_is_not_committed(
    postgres: PostgresServer,
) -> None:
    """Without that, what its predecessor commits a moment later would not be in what it reads first."""
    url = postgres_store(postgres)
    first, second = await Database.open(StoreSettings(url=url)), await Database.open(StoreSettings(url=url))
    fence = await first.submit(claim("a", 0, lease_s=-1.0))
    assert fence is not None
    inside, go_on = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        append(1)(connection)
        inside.set()
        assert go_on.wait(60)

    writing = first.fenced(fence).submit(slow)
    await asyncio.to_thread(inside.wait, 60)
    claiming = second.submit(claim("b", 1))
    seen = second.submit(numbers)
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")

    async def waits() -> bool:
        return bool(await first.read(lambda c: c.scalar(waiting)))

    await until(waits, "the claim waits for the write")
    assert not claiming.done()
    go_on.set()
    await writing
    assert (await claiming, await seen) == (2, [1])
    with pytest.raises(Fenced):
        await first.fenced(fence).submit(append(2))
    await first.close()
    await second.close()
