"""The one writer: order, durability, and failures that stay alone."""

from __future__ import annotations

import asyncio
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
from tests.unit.gateway.store.rows import append, numbers


@pytest.fixture
def settings(store_url: str) -> StoreSettings:
    return StoreSettings(url=store_url)


def fail(connection: Connection) -> None:
    """Write, and then breaks a constraint."""
    statements.insert_event(connection, "m", {"number": -1}, [])
    connection.execute(text("INSERT INTO episodes (id) VALUES ('x')"))


async def test_a_store_whose_folder_is_missing_is_made(tmp_path: Path) -> None:
    database = await Database.open(StoreSettings(url=f"sqlite:///{tmp_path}/deep/inside/store.db"))
    await database.submit(append(1))
    assert await database.read(numbers) == [1]
    await database.close()


async def test_a_write_that_fails_fails_alone(database: Database) -> None:
    def defect(_connection: Connection) -> None:
        raise KeyError("a bug")

    wrong = {3: fail, 5: defect, 7: fail}
    submitted = [database.submit(wrong.get(n, append(n))) for n in range(10)]
    results = await asyncio.gather(*submitted, return_exceptions=True)
    kinds = {n: type(result) for n, result in enumerate(results) if isinstance(result, Exception)}
    assert kinds == {3: IntegrityError, 5: KeyError, 7: IntegrityError}
    assert await database.read(numbers) == [n for n in range(10) if n not in wrong]
    assert database.healthy


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


async def test_what_was_submitted_is_there_after_closing_and_opening_again(settings: StoreSettings) -> None:
    first = await Database.open(settings)
    pending = [first.submit(append(n)) for n in range(1000)]
    await first.close()
    assert all(p.done() for p in pending)
    second = await Database.open(settings)
    assert await second.read(numbers) == list(range(1000))
    await second.close()


async def test_a_submitter_that_stops_waiting_disturbs_no_other(database: Database) -> None:
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
    questions = (
        ("PRAGMA journal_mode", "PRAGMA synchronous", "PRAGMA foreign_keys")
        if store_url.startswith("sqlite")
        else ("SHOW synchronous_commit", "SHOW idle_in_transaction_session_timeout", "SHOW application_name")
    )

    def responses(connection: Connection) -> tuple[Any, ...]:
        return tuple(connection.scalar(text(question)) for question in questions)

    wanted = ("wal", 2, 1) if store_url.startswith("sqlite") else ("on", "10s", "headgate")
    assert await database.submit(responses) == await database.read(responses) == wanted
