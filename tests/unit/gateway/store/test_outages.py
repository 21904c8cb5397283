"""A PostgreSQL server that goes away: the acknowledged is there once, the rest is acknowledged later, reads are bounded."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from gateway.config import StoreSettings
from gateway.config.settings import ConfigError
from gateway.store import commits
from gateway.store import ledger as statements
from gateway.store.commits import Committer
from gateway.store.connections import connect
from gateway.store.database import Database
from gateway.store.schema import bring_up_to_date
from headgate.errors import Conflict, Unavailable, Unprocessable
from tests.harness.servers import PostgresServer, postgres_server
from tests.harness.waiting import turns, until, within
from tests.unit.gateway.store.locks import wait_for_a_lock
from tests.unit.gateway.store.rows import append, numbers


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Yield a server that these tests may stop."""
    with postgres_server() as own:
        yield own


@pytest.fixture
def settings(server: PostgresServer) -> Iterator[StoreSettings]:
    """Yield an empty database; the server runs again afterwards."""
    yield StoreSettings(url=server.url(server.new_database()))
    if not server.running:
        server.start()


async def written(acknowledged: list[int], count: int) -> None:
    """Wait for `count` writes, and look often, because they go on."""
    await until(lambda: len(acknowledged) >= count, f"{count} writes", every_s=0.001)


@pytest.mark.parametrize("how", ["kill", "immediate", "fast"])
async def test_a_server_that_dies_while_it_commits_loses_and_doubles_nothing(
    server: PostgresServer, settings: StoreSettings, how: Any
) -> None:
    database = await Database.open(settings)
    acknowledged: list[int] = []
    order = random.Random(how)

    async def write(number: int) -> None:
        assert await database.submit(append(number)) == number
        acknowledged.append(number)

    missed = asyncio.Event()

    async def many() -> int:
        """Write until both outages were noticed: a server that ends slowly is not noticed by who has nothing to write."""
        running: list[asyncio.Task[None]] = []
        while len(running) < 200 or not missed.is_set():
            running.append(asyncio.create_task(write(len(running))))
            if order.random() < 0.3:
                await turns(1)
                await written(acknowledged, len(running) - 39)
        await asyncio.gather(*running)
        return len(running)

    writing = asyncio.create_task(many())
    for threshold in (order.randrange(20, 60), order.randrange(80, 160)):
        await written(acknowledged, threshold)
        await asyncio.to_thread(server.stop, how)
        survived = len(acknowledged)
        await until(lambda: not database.reachable, "its database is missed")
        await asyncio.to_thread(server.start)
        stored = await database.read(numbers)
        assert set(acknowledged[:survived]) <= set(stored)
    missed.set()
    async with within("everything is written"):
        count = await writing
    stored = await database.read(numbers)
    await database.close()
    assert stored == list(range(count))
    assert sorted(acknowledged) == stored
    assert database.reachable


class _Cut(Committer):
    """Loses its connection at the first COMMITs: `before` the server has it, `after` it, or with the transaction left `open`."""

    def __init__(self, engine: Engine, cuts: list[str]) -> None:
        super().__init__(engine)
        self.cuts = cuts
        self.left_open: list[psycopg.Connection[Any]] = []
        event.listen(engine, "commit", self._cut)

    def _cut(self, connection: Connection) -> None:
        if connection is not self._connection or not self.cuts:
            return
        raw = connection.connection.dbapi_connection
        assert isinstance(raw, psycopg.Connection)
        match self.cuts.pop(0):
            case "before":
                raw.close()
            case "after":
                raw.commit()
                raw.close()
            case "open":  # the network is cut: what this end sends does not arrive
                self.left_open.append(raw)
                raw.rollback = raw.close = lambda: None  # type: ignore[method-assign]
        raise OperationalError("COMMIT", None, psycopg.OperationalError("the connection is lost"))


@pytest.mark.parametrize(
    "cuts",
    [
        ["after"],
        ["before"],
        ["before", "after"],
        ["before", "before", "after"],
        ["before", "before", "before"],
    ],
    ids="-".join,
)
def test_a_commit_without_a_response_is_found_or_done_again(settings: StoreSettings, cuts: list[str]) -> None:
    """The result of each write is that of the transaction that was committed."""
    engine = connect(settings.url, 2)
    bring_up_to_date(engine, settings)
    committer = _Cut(engine, list(cuts))
    runs: list[int] = []

    def write(connection: Connection) -> int:
        runs.append(len(runs))
        append(runs[-1])(connection)
        return runs[-1]

    outcomes = committer.commit([write, append(100)])
    with engine.connect() as connection:
        stored = numbers(connection)
    assert [error for _, error in outcomes] == [None, None]
    assert stored == [outcomes[0][0], 100]
    assert len(runs) == len(cuts) + (cuts[-1] == "before")
    assert committer.commit([append(200)]) == [(200, None)]
    with engine.connect() as connection:
        assert numbers(connection) == [*stored, 200]
        assert connection.scalar(text("SELECT count(*) FROM writers")) == 1
    committer.close()
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM writers")) == 0
    engine.dispose()


@pytest.mark.usefixtures("idle")
def test_a_try_that_the_server_is_still_busy_with_is_waited_for(settings: StoreSettings) -> None:
    """The old connection is cut off at our end alone, as by a network; its transaction commits later."""
    engine = connect(settings.url, 3)
    bring_up_to_date(engine, settings)
    committer = _Cut(engine, ["open"])

    def keep(connection: Connection) -> int:
        number = 1 + len(committer.left_open)
        append(number)(connection)
        return number

    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.extend(committer.commit([keep])))
    thread.start()
    wait_for_a_lock(settings.url)
    assert outcomes == []
    committer.left_open[0].commit()
    thread.join(60)
    assert outcomes == [(1, None)]
    with engine.connect() as connection:
        assert numbers(connection) == [1]
    engine.dispose()


async def test_writes_wait_in_order_and_further_ones_are_refused_while_the_server_is_away(
    server: PostgresServer, settings: StoreSettings
) -> None:
    database = await Database.open(settings.model_copy(update={"max_pending": 20, "read_wait_s": 0.3}))
    await database.submit(append(0))
    assert (database.healthy, database.reachable) == (True, True)
    await asyncio.to_thread(server.stop, "kill")
    waiting = [database.submit(append(number)) for number in range(1, 21)]
    with pytest.raises(Unavailable) as busy:
        database.submit(append(99))
    assert (busy.value.code, busy.value.status, bool(busy.value.retry_after)) == ("store_busy", 503, True)
    with pytest.raises(Unavailable):
        database.check()
    await until(lambda: not database.reachable, "its database is missed")
    assert database.healthy
    with pytest.raises(Unavailable, match="step 'read'") as down:
        await database.read(numbers)
    assert (down.value.code, down.value.status, bool(down.value.retry_after)) == ("store_down", 503, True)
    assert not any(future.done() for future in waiting)
    await asyncio.to_thread(server.start)
    await asyncio.gather(*waiting)
    assert database.reachable
    assert await database.read(numbers) == list(range(21))
    await database.close()


async def test_a_read_during_an_outage_is_served_after_it(
    server: PostgresServer, settings: StoreSettings
) -> None:
    database = await Database.open(settings.model_copy(update={"read_wait_s": 60.0}))
    await database.submit(append(1))
    await asyncio.to_thread(server.stop, "immediate")
    reading = [asyncio.create_task(database.read(numbers)) for _ in range(3)]
    await until(lambda: not database.reachable, "a read has failed")
    await asyncio.to_thread(server.start)
    assert await asyncio.gather(*reading) == [[1]] * 3
    await database.close()


async def test_a_server_that_stands_still_is_noticed(
    server: PostgresServer, settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections are there, and it is silent: reads are bounded, writes wait."""
    monkeypatch.setattr(commits, "_SLOW_S", 0.2)
    database = await Database.open(settings.model_copy(update={"read_wait_s": 0.5}))
    await database.submit(append(0))
    assert await database.read(numbers) == [0]
    await asyncio.to_thread(server.pause)
    try:
        waiting = database.submit(append(1))
        await until(lambda: not database.reachable, "its database is missed")
        for _ in range(6):  # more than there are readers
            with pytest.raises(Unavailable, match="step 'read'"):
                await database.read(numbers)
        assert not waiting.done()
    finally:
        await asyncio.to_thread(server.resume)
    await waiting
    assert await database.read(numbers) == [0, 1]
    assert database.reachable
    await database.close()


async def test_closing_during_an_outage_ends_and_reports_writes_as_unknown(
    server: PostgresServer, settings: StoreSettings
) -> None:
    database = await Database.open(settings.model_copy(update={"read_wait_s": 0.2}))
    await asyncio.to_thread(server.stop, "kill")
    waiting = [database.submit(append(number)) for number in range(300)]
    async with within("the database is closed"):
        await database.close()
    for future in waiting:
        with pytest.raises(Unavailable, match="not known whether this was stored"):
            await future


async def test_starting_without_a_database_is_refused_in_words(
    server: PostgresServer, settings: StoreSettings, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(server.stop, "fast")
    url = settings.url.replace("headgate@", "headgate:secret@")
    with pytest.raises(ConfigError, match="cannot be reached") as error:
        await Database.open(settings.model_copy(update={"read_wait_s": 0.2, "url": url}))
    assert "secret" not in str(error.value)
    caplog.clear()
    starting = asyncio.create_task(Database.open(settings.model_copy(update={"read_wait_s": 60.0})))
    await until(lambda: "the database is not ready" in caplog.text, "it has tried to reach the server")
    await asyncio.to_thread(server.start)
    await (await starting).close()


async def test_errors_of_a_write_stay_its_own_on_a_server_that_ends_transactions(
    settings: StoreSettings,
) -> None:
    database = await Database.open(settings)

    def refused(_connection: Connection) -> None:
        raise Conflict("no")

    def broken(connection: Connection) -> None:
        append(-1)(connection)
        connection.execute(text("INSERT INTO episodes (id) VALUES ('x')"))

    def hidden(connection: Connection) -> None:
        with suppress(IntegrityError):
            broken(connection)

    def unheld(connection: Connection) -> None:
        statements.set_version(connection, "m", 2**70, "live", [])

    wrong = {3: refused, 5: broken, 6: hidden, 8: unheld}
    outcomes = await asyncio.gather(
        *[database.submit(wrong.get(n, append(n))) for n in range(10)], return_exceptions=True
    )
    kinds = {n: type(outcome) for n, outcome in enumerate(outcomes) if isinstance(outcome, Exception)}
    assert kinds == {3: Conflict, 5: IntegrityError, 6: RuntimeError, 8: Unprocessable}
    assert await database.read(numbers) == [0, 1, 2, 4, 7, 9]
    with pytest.raises(Unprocessable):
        await database.read(lambda c: statements.version(c, "m", 2**70))
    await database.close()


@pytest.mark.usefixtures("idle")
async def test_a_deadlock_is_tried_again(settings: StoreSettings) -> None:
    """Two processes write the same two rows in opposite order; the server ends one of the two transactions."""
    one, other = await Database.open(settings), await Database.open(settings)
    await one.submit(lambda c: c.execute(text("CREATE TABLE pairs (id int PRIMARY KEY, n int)")) and None)
    await one.submit(lambda c: c.execute(text("INSERT INTO pairs VALUES (1, 0), (2, 0)")) and None)
    both = threading.Barrier(2)
    runs: list[int] = []

    def raise_both(*order: int) -> Callable[[Connection], None]:
        def write(connection: Connection) -> None:
            runs.append(order[0])
            first, second = order
            connection.execute(text(f"UPDATE pairs SET n = n + 1 WHERE id = {first}"))
            with suppress(threading.BrokenBarrierError):
                both.wait(60) if len(runs) <= 2 else None
            connection.execute(text(f"UPDATE pairs SET n = n + 1 WHERE id = {second}"))

        return write

    await asyncio.gather(one.submit(raise_both(1, 2)), other.submit(raise_both(2, 1)))
    assert len(runs) >= 3
    assert await one.read(lambda c: c.execute(text("SELECT n FROM pairs ORDER BY id")).scalars().all()) == [
        2,
        2,
    ]
    await one.close()
    await other.close()


async def test_a_process_that_stands_still_loses_its_transaction(settings: StoreSettings) -> None:
    """Its locks would hold every other process up; when it goes on, it writes again from the start."""
    database = await Database.open(settings)
    runs: list[int] = []

    def stand_still(connection: Connection) -> None:
        runs.append(1)
        append(7)(connection)
        if len(runs) == 1:
            pid = connection.scalar(text("SELECT pg_backend_pid()"))
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
            with psycopg.connect(settings.url, autocommit=True) as looking:
                while looking.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone():
                    time.sleep(0.01)

    await database.submit(stand_still)
    assert len(runs) == 2
    assert await database.read(numbers) == [7]
    await database.close()


async def test_reads_see_one_moment_and_cannot_write(settings: StoreSettings) -> None:
    database = await Database.open(settings)
    await database.submit(append(1))
    between, go_on = threading.Event(), threading.Event()

    def twice(connection: Connection) -> tuple[list[int], list[int]]:
        before = numbers(connection)
        between.set()
        assert go_on.wait(60)
        return before, numbers(connection)

    reading = asyncio.create_task(database.read(twice))
    await asyncio.to_thread(between.wait, 60)
    await database.submit(append(2))
    go_on.set()
    assert await reading == ([1], [1])
    with pytest.raises(DBAPIError, match="read-only"):
        await database.read(append(3))
    assert await database.read(numbers) == [1, 2]
    await database.close()
