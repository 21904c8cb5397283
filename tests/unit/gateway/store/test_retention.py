"""Selection of episodes by retention, row by row."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, delete, insert, select

from gateway.config import StoreSettings
from gateway.episodes.retention import prune
from gateway.store import episodes as statements
from gateway.store import retention, tallies
from gateway.store.database import Database
from gateway.store.decisions import Decision, insert_decisions
from gateway.store.models import CallRow, DecisionRow, EpisodeRow, LeaseRow, ResponseRow
from gateway.store.retention import Ages, Swept

NOW = 1000.0
ALL = Ages(NOW, NOW, NOW)


def episode(
    connection: Connection, name: str, group: str, at: float = 1.0, *, mode: str = "train", calls: int = 0
) -> None:
    """Insert a closed episode, and for a training episode the decision that admitted it."""
    row = {
        "id": name, "key_hash": name, "task_id": "t", "group_id": group, "mode": mode, "model": "m", "details": {},
        "version": 0, "state": "closed", "reason": "rewarded", "created_at": at, "closed_at": at,
    }  # fmt: skip
    statements.insert_episode(connection, row)
    if mode == "train":
        decide(connection, Decision("admitted", group, name))
    for number in range(calls):
        call = {
            "id": f"{name}-{number}", "episode_id": name, "model": "m", "node": 0, "request_key": "", "api": "chat",
            "stream": False, "requested": {}, "used": {}, "logprobs_mode": "", "engine": "e", "finish_reason": "stop",
            "prompt_tokens": 1, "completion_tokens": 1, "pauses": 0, "digest": b"", "received_at": at, "seconds": 1.0,
        }  # fmt: skip
        connection.execute(insert(CallRow), call)


def decide(connection: Connection, *decisions: Decision) -> None:
    insert_decisions(connection, "m", decisions)


def trained(group: str, *names: str, batch: int = 0) -> Decision:
    return Decision("trained", group, batch=batch, entry=0, details={"episodes": list(names)})


def acked(connection: Connection, fence: int, batch: int, checkpoint: str) -> None:
    row = {
        "model": "m", "fence": fence, "id": f"lease-{fence}", "batch": batch, "consumer": "c", "state": "acked",
        "checkpoint": checkpoint, "created_at": 1.0, "deadline": 1.0,
    }  # fmt: skip
    connection.execute(insert(LeaseRow), row)


def response(connection: Connection, name: str, of: str, previous: str = "") -> None:
    row = {
        "id": name, "episode_id": of, "api": "responses", "model": "m", "previous": previous, "messages": [], "input": [],
        "answer": {}, "created_at": 1.0,
    }  # fmt: skip
    connection.execute(insert(ResponseRow), row)


def swept(connection: Connection, ages: Ages = ALL, *, dry: bool = False) -> Swept:
    """All pages."""
    total, place = Swept(), None
    while True:
        some, place = retention.sweep(connection, ages, place, dry=dry)
        total.add(some)
        if place is None:
            return total


def there(connection: Connection) -> set[str]:
    return set(connection.scalars(select(EpisodeRow.id)))


def kinds(connection: Connection) -> list[tuple[str, str]]:
    rows = connection.execute(select(DecisionRow.kind, DecisionRow.episode_id).order_by(DecisionRow.seq))
    return [(row.kind, row.episode_id) for row in rows]


def test_a_member_of_an_unfinished_group_stays_although_one_of_this_name_ended(
    connection: Connection,
) -> None:
    decide(connection, Decision("dropped", "g", reason="earlier"))
    episode(connection, "later", "g")
    assert swept(connection).needed == {"group": 1}
    decide(connection, Decision("dropped", "g", reason="now"))
    assert swept(connection).deleted == {"untrained": 1}


def test_a_member_that_its_batch_left_out_is_not_trained(connection: Connection) -> None:
    for name in ("in", "out"):
        episode(connection, name, "g")
    decide(connection, trained("g", "in"))
    acked(connection, 1, 0, "")
    assert swept(connection, Ages(None, NOW, None)).deleted == {"untrained": 1}
    assert there(connection) == {"in"}


def test_an_episode_without_a_decision_stays(connection: Connection) -> None:
    episode(connection, "old", "g")
    connection.execute(delete(DecisionRow))
    decide(connection, Decision("dropped", "g"))
    assert swept(connection).needed == {"unknown": 1}
    assert there(connection) == {"old"}


def test_batches_from_the_first_that_names_the_newest_checkpoint_on_are_kept(connection: Connection) -> None:
    for batch in range(5):
        episode(connection, f"ep-{batch}", f"g{batch}")
        decide(connection, trained(f"g{batch}", f"ep-{batch}", batch=batch))
        acked(connection, batch + 1, batch, "one" if batch < 2 else "two")
    assert swept(connection).needed == {"checkpoint": 3}
    assert there(connection) == {"ep-2", "ep-3", "ep-4"}


def test_a_response_that_another_episode_goes_on_from_keeps_its_own(connection: Connection) -> None:
    for name in ("before", "after", "alone"):
        episode(connection, name, "g", mode="eval")
    response(connection, "a1", "before")
    response(connection, "a2", "after", "a1")
    response(connection, "b1", "alone")
    response(connection, "b2", "alone", "b1")
    first = swept(connection)
    assert (first.deleted, first.needed) == ({"eval": 2}, {"responses": 1})
    assert there(connection) == {"before"}
    assert swept(connection).deleted == {"eval": 1}


async def test_pruning_goes_on_to_the_last_page(store_url: str) -> None:
    database = await Database.open(StoreSettings(url=store_url))
    names = [f"ep-{number:03d}" for number in range(2 * retention.PAGE)]

    def fill(connection: Connection) -> None:
        for number, name in enumerate(names):
            episode(connection, name, "g", at=float(number), mode="eval")

    try:
        await database.submit(fill)
        for dry in (True, False):
            assert (await prune(database, ALL, dry=dry)).deleted == {"eval": len(names)}
            assert await database.read(there) == (set(names) if dry else set())
        assert not any((await database.read(lambda c: tallies.tallies(c, None))).values())
    finally:
        await database.close()


def test_one_transaction_deletes_a_bounded_number_of_calls(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_CALLS", 5)
    for number, calls in enumerate((3, 2, 1, 9, 1)):
        episode(connection, f"ep-{number}", "g", at=float(number), mode="eval", calls=calls)
    pages: list[int] = []
    place: Any = None
    while True:
        some, place = retention.sweep(connection, ALL, place, dry=False)
        pages.append(some.calls)
        if place is None:
            break
    assert pages == [5, 1, 9, 1]
    assert there(connection) == set()


def test_what_was_decided_about_a_group_goes_with_its_last_member(connection: Connection) -> None:
    for number, name in enumerate(("first", "second")):
        episode(connection, name, "g", at=float(number))
    decide(connection, Decision("finished", "g"), Decision("dropped", "g"))
    assert swept(connection, Ages(0.5, 0.5, 0.5)).deleted == {"untrained": 1}
    assert kinds(connection) == [
        ("admitted", "second"), ("finished", ""), ("dropped", ""), ("deleted", "first"),
    ]  # fmt: skip
    assert swept(connection).deleted == {"untrained": 1}
    assert kinds(connection) == [("deleted", "first"), ("deleted", "second")]


def test_the_record_of_a_trained_batch_stays(connection: Connection) -> None:
    episode(connection, "ep", "g")
    decide(connection, trained("g", "ep"))
    acked(connection, 1, 0, "")
    assert swept(connection).deleted == {"trained": 1}
    assert kinds(connection) == [("trained", ""), ("deleted", "ep")]


def test_only_what_is_alone_is_forgotten(connection: Connection) -> None:
    episode(connection, "ep", "g")
    decide(connection, Decision("refused", "g", "never", "no_slot"), Decision("deleted", "h", "gone"))
    assert retention.forget(connection, 0.0) == 0
    assert retention.forget(connection, 1e12) == 2
    assert kinds(connection) == [("admitted", "ep")]
