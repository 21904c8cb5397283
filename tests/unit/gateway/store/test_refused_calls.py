"""Refused calls in the store: bounded, and the last one of an episode decides whether its context was full at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Connection, Engine, delete, insert

from gateway.store import episodes, refused_calls
from gateway.store.models import CallRow, EpisodeRow
from gateway.store.refused_calls import CONTEXT_FULL, MOST, RefusedCall
from tests.unit.gateway.store import rows

ONE = RefusedCall(5.0, "chat", "m", 400, "invalid_value", "stop: \0 too many")
FULL = replace(ONE, code=CONTEXT_FULL, message="too long")


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """Yield a connection to a store with one episode."""
    with engine.begin() as opened:
        episodes.insert_episode(opened, rows.episode("a"))
        yield opened


def add(connection: Connection, *refused: RefusedCall) -> None:
    for one in refused:
        refused_calls.add(connection, "a", one)


def test_equal_refusals_in_a_row_are_one_and_leave_with_their_episode(connection: Connection) -> None:
    add(connection, ONE, replace(ONE, at=6.0), FULL, replace(ONE, at=8.0))
    found = refused_calls.of_episode(connection, "a")
    assert [(row["at"], row["code"], row["times"]) for row in found] == [
        (6.0, "invalid_value", 2),
        (5.0, CONTEXT_FULL, 1),
        (8.0, "invalid_value", 1),
    ]
    assert found[0]["message"] == ONE.message
    connection.execute(delete(EpisodeRow).where(EpisodeRow.id == "a"))
    assert refused_calls.of_episode(connection, "a") == []


def test_beyond_the_bound_the_newest_takes_the_last_place(connection: Connection) -> None:
    add(connection, *(replace(ONE, at=float(n), message=f"number {n}") for n in range(MOST + 10)))
    found = refused_calls.of_episode(connection, "a")
    assert len(found) == MOST
    assert (found[0]["message"], found[-1]["message"]) == ("number 0", f"number {MOST + 9}")
    assert sum(row["times"] for row in found) == MOST + 10


@pytest.mark.parametrize(
    ("refused", "responded", "full"),
    [
        ([FULL], 4.0, True),
        ([FULL], 6.0, False),
        ([FULL, replace(ONE, at=7.0)], 4.0, True),
        ([replace(FULL, model="judge")], 4.0, False),
        ([ONE], 4.0, False),
        ([], 4.0, False),
    ],
)
def test_a_context_is_full_at_the_end_if_no_later_call_was_served(
    connection: Connection, refused: list[RefusedCall], responded: float, full: bool
) -> None:
    connection.execute(insert(CallRow), rows.call("c", "a", received_at=responded))
    add(connection, *refused)
    assert refused_calls.ended_full(connection, "m", ["a", "b"]) == ({"a"} if full else set())
