"""Writes that are executed together with their neighbors succeed or fail alone all the same."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from gateway.config import StoreSettings
from gateway.store.commits import Rows
from gateway.store.database import Database

_INSERT = text("INSERT INTO numbers (number) VALUES (:number)")


def _create(connection: Connection) -> None:
    connection.execute(text("CREATE TABLE numbers (number INTEGER PRIMARY KEY)"))


def _numbers(connection: Connection) -> list[int]:
    return list(connection.scalars(text("SELECT number FROM numbers ORDER BY number")))


async def test_neighbors_are_written_in_one_and_in_their_order(tmp_path: Path) -> None:
    database = await Database.open(StoreSettings(url=f"sqlite:///{tmp_path}/store.db"))
    calls: list[Any] = []

    def insert(connection: Connection, numbers: list[int]) -> None:
        calls.append(numbers)
        connection.execute(_INSERT, [{"number": number} for number in numbers])

    def other(_: Connection) -> str:
        calls.append("other")
        return "answer"

    def busy(connection: Connection) -> None:
        """While this waits, all that follows becomes one group."""
        _create(connection)
        begun.set()
        assert submitted.wait(60)

    begun, submitted = threading.Event(), threading.Event()
    try:
        futures: list[Any] = [database.submit(busy)]
        assert await asyncio.to_thread(begun.wait, 60)
        following: list[Any] = [*(Rows(insert, n) for n in (1, 2)), other, Rows(insert, 3)]
        futures += [database.submit(write) for write in following]
        submitted.set()
        assert await asyncio.gather(*futures) == [None, None, None, "answer", None]
        assert calls == [[1, 2], "other", [3]]
        assert await database.read(_numbers) == [1, 2, 3]
    finally:
        submitted.set()
        await database.close()


async def test_a_row_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    database = await Database.open(StoreSettings(url=f"sqlite:///{tmp_path}/store.db"))

    def insert(connection: Connection, numbers: list[int]) -> None:
        connection.execute(_INSERT, [{"number": number} for number in numbers])

    try:
        await database.submit(_create)
        futures = [database.submit(Rows(insert, number)) for number in (1, 2, 1, 3)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), type(None), IntegrityError, type(None)]
        assert await database.read(_numbers) == [1, 2, 3]
        with pytest.raises(IntegrityError):
            await database.submit(Rows(insert, 3))
    finally:
        await database.close()
