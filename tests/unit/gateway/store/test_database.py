"""The one writer: order, durability, and failures that stay alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from gateway.config import StoreSettings
from gateway.store import ledger as statements
from gateway.store.commits import Committer
from gateway.store.connections import connect
from gateway.store.database import Database
from headgate.errors import Unavailable


@pytest.fixture
def settings(store_url: str) -> StoreSettings:
    return StoreSettings(url=store_url)


@pytest.fixture
async def database(settings: StoreSettings) -> AsyncIterator[Database]:
    opened = await Database.open(settings)
    yield opened
    await opened.close()


def append(number: int) -> Any:
    return lambda connection: statements.insert_event(connection, "m", {"number": number}, [])


def numbers(connection: Connection) -> list[int]:
    return [event["number"] for event in statements.events(connection, "m")]


def fail(connection: Connection) -> None:
    """Writes, and then breaks a constraint."""
    statements.insert_event(connection, "m", {"number": -1}, [])
    connection.execute(text("INSERT INTO episodes (id) VALUES ('x')"))


async def test_a_store_whose_folder_is_missing_is_made(tmp_path: Path) -> None:
    database = await Database.open(StoreSettings(url=f"sqlite:///{tmp_path}/deep/inside/store.db"))
    await database.submit(append(1))
    assert await database.read(numbers) == [1]
    await database.close()


async def test_writes_are_kept_in_the_order_in_which_they_were_submitted(database: Database) -> None:
    await asyncio.gather(*[database.submit(append(n)) for n in range(600)])
    assert await database.read(numbers) == list(range(600))


async def test_a_write_that_fails_fails_alone(database: Database) -> None:
    submitted = [database.submit(fail if n in (3, 7) else append(n)) for n in range(10)]
    results = await asyncio.gather(*submitted, return_exceptions=True)
    assert [n for n, r in enumerate(results) if isinstance(r, IntegrityError)] == [3, 7]
    assert await database.read(numbers) == [n for n in range(10) if n not in (3, 7)]
    assert database.healthy


async def test_an_error_that_is_not_the_databases_fails_alone_too(database: Database) -> None:
    def wrong(_connection: Connection) -> None:
        raise KeyError("a bug")

    good, bad = database.submit(append(1)), database.submit(wrong)
    with pytest.raises(KeyError, match="a bug"):
        await bad
    await good
    assert await database.read(numbers) == [1]


async def test_a_savepoint_is_taken_back_with_the_transaction(database: Database, store_url: str) -> None:
    found: list[list[int]] = []

    def nested(connection: Connection) -> None:
        found.append(numbers(connection))
        with connection.begin_nested():
            statements.insert_event(connection, "m", {"number": 1}, [])

    engine = connect(store_url, 1)
    committer = Committer(engine)
    (_, good), (_, bad) = committer.commit([nested, fail])
    committer.close()
    engine.dispose()
    assert good is None
    assert isinstance(bad, IntegrityError)
    assert found == [[], []], "it runs again, and what it wrote at first is gone"
    assert await database.read(numbers) == [1]


async def test_a_write_answers_what_it_returned(database: Database) -> None:
    assert await database.submit(lambda _: 42) == 42


async def test_what_was_submitted_is_there_after_closing_and_opening_again(settings: StoreSettings) -> None:
    first = await Database.open(settings)
    pending = [first.submit(append(n)) for n in range(1000)]
    await first.close()
    assert all(p.done() for p in pending)
    second = await Database.open(settings)
    assert await second.read(numbers) == list(range(1000))
    await second.close()


async def test_writes_of_many_tasks_are_all_durable(settings: StoreSettings) -> None:
    database = await Database.open(settings)

    async def work(task: int) -> None:
        for step in range(20):
            await database.submit(append(task * 20 + step))

    await asyncio.gather(*[work(task) for task in range(25)])
    await database.close()
    again = await Database.open(settings)
    stored = await again.read(numbers)
    await again.close()
    assert sorted(stored) == list(range(500))
    for task in range(25):
        own = [n for n in stored if n // 20 == task]
        assert own == sorted(own)


async def test_a_write_is_visible_once_it_was_awaited(database: Database) -> None:
    for number in range(3):
        await database.submit(append(number))
        assert (await database.read(numbers))[-1] == number


async def test_a_submitter_that_stops_waiting_disturbs_nobody(database: Database) -> None:
    given_up, other = database.submit(append(1)), database.submit(append(2))
    given_up.cancel()
    await other
    assert await database.read(numbers) == [1, 2]


async def test_too_many_waiting_writes_are_refused(settings: StoreSettings) -> None:
    database = await Database.open(settings.model_copy(update={"max_pending": 2}))
    accepted = [database.submit(append(n)) for n in range(2)]
    with pytest.raises(Unavailable, match="too many writes wait"):
        database.submit(append(2))
    await asyncio.gather(*accepted)
    await database.submit(append(3))
    assert await database.read(numbers) == [0, 1, 3]
    await database.close()


async def test_nothing_is_accepted_after_closing(settings: StoreSettings) -> None:
    database = await Database.open(settings)
    await database.close()
    assert not database.healthy
    with pytest.raises(Unavailable, match="writes to the database has ended"):
        database.submit(append(1))


async def test_a_commit_reaches_the_disk_before_it_is_reported(database: Database, store_url: str) -> None:
    asked = (
        ("PRAGMA journal_mode", "PRAGMA synchronous", "PRAGMA foreign_keys")
        if store_url.startswith("sqlite")
        else ("SHOW synchronous_commit", "SHOW idle_in_transaction_session_timeout", "SHOW application_name")
    )

    def told(connection: Connection) -> tuple[Any, ...]:
        return tuple(connection.scalar(text(question)) for question in asked)

    wanted = ("wal", 2, 1) if store_url.startswith("sqlite") else ("on", "10s", "headgate")
    assert await database.submit(told) == await database.read(told) == wanted
