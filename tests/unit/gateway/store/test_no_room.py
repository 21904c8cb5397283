"""A disk that is full: nothing acknowledged is lost, what waits is written once there is room, and errors name the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from gateway.config import StoreSettings
from gateway.config.settings import ConfigError
from gateway.store.connections import connect
from gateway.store.database import Database
from gateway.store.schema import bring_up_to_date
from headgate.errors import Unavailable
from tests.harness.disk import Disk
from tests.harness.waiting import until, within
from tests.unit.gateway.store.rows import append, numbers

TEXT = "x" * 20_000


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(StoreSettings(url=store_url, read_wait_s=60.0))
    yield opened
    await opened.close()


async def full(database: Database, disk: Disk, write: Callable[[], asyncio.Future[int]]) -> Any:
    """Fill the disk while the writer is at work, and return the write that it met first."""
    disk.fill()
    database._committer._drop()  # so that its next connection has the limit
    waiting = write()
    await until(lambda: database._committer.full or waiting.done(), "the disk is full")
    assert not waiting.done(), waiting
    return waiting


async def test_what_was_acknowledged_stays_and_what_waits_is_written_once_there_is_room(
    database: Database,
) -> None:
    disk = Disk(database._engine)
    for number in range(5):
        assert await database.submit(append(number, TEXT)) == number
    first = await full(database, disk, lambda: database.submit(append(5, TEXT)))
    with pytest.raises(Unavailable, match=r"the disk of the database \(\[store\] url\) is full") as error:
        database.check()
    assert (error.value.code, error.value.retry_after) == ("store_full", 10.0)
    assert not database.reachable
    assert await database.read(numbers) == [0, 1, 2, 3, 4], "what is there can be read"
    later = [database.submit(append(number, TEXT)) for number in (6, 7)]
    assert not any(one.done() for one in (first, *later))
    disk.make_room()
    async with within("what waited is written"):
        assert [await one for one in (first, *later)] == [5, 6, 7]
    database.check()
    assert database.reachable
    assert await database.read(numbers) == list(range(8))


def test_a_start_without_room_is_refused_by_name(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    engine = connect(url, 1)
    event.listen(engine, "connect", lambda raw, _record: raw.execute("PRAGMA max_page_count=2"))
    try:
        with pytest.raises(ConfigError, match=r"\[store\] url.*disk is full"):
            bring_up_to_date(engine, StoreSettings(url=url, read_wait_s=0.1))
    finally:
        engine.dispose()
