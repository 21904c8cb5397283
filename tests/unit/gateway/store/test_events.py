"""The stream of events in SQL: stored with their changes, in the order of commits, and deleted from the oldest on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, delete, event

from gateway.config import StoreSettings
from gateway.episodes import retention
from gateway.store import coordination, decisions, episodes, events, ledger
from gateway.store.commits import Committer
from gateway.store.connections import connect
from gateway.store.database import Database
from gateway.store.decisions import Decision
from gateway.store.events import Event, EventFilter, Extent
from gateway.store.models import EventRow
from headgate.errors import Fenced
from tests.unit.gateway.store.locks import wait_for_a_lock
from tests.unit.gateway.store.rows import episode

LEASE = {"fence": 3, "id": "l", "model": "m", "batch": 1, "consumer": "t", "state": "held"}


@pytest.fixture
def committer(engine: Engine) -> Iterator[Committer]:
    made = Committer(engine)
    yield made
    made.close()


def stored(engine: Engine, last: int = 0, wanted: EventFilter = events.EVERYTHING) -> list[Event]:
    with engine.connect() as connection:
        return events.after(connection, last, 1000, wanted)


def emit(*kinds: str, **others: Any) -> Any:
    return lambda c: events.insert_events(c, [Event(kind, "m", **others) for kind in kinds])


def test_every_change_has_its_event_in_the_order_of_the_changes(engine: Engine, committer: Committer) -> None:
    rewarded = {"state": "closed", "reason": "rewarded", "reward": 0.5, "components": {"a": 0.5}}
    report = [{"engine": "m-0", "seconds": {"load": 0.1}}]
    later = {**LEASE, "fence": 4, "id": "l4"}
    changes: list[tuple[Any, list[tuple[str, str, str, dict[str, Any]]]]] = [
        (
            lambda c: episodes.insert_episode(c, episode("e", agent="x")),
            [("episode.opened", "e", "g", {"task_id": "t", "mode": "train", "version": 0, "agent": "x"})],
        ),
        (lambda c: episodes.begin_grading(c, "e"), [("episode.grading", "e", "g", {})]),
        (
            lambda c: episodes.close_episode(c, "e", rewarded),
            [
                ("episode.closed", "e", "g", {
                    "task_id": "t", "mode": "train", "version": 0, "reason": "rewarded", "reward": 0.5, "components": {"a": 0.5},
                })
            ],
        ),
        (lambda c: episodes.close_episode(c, "another", rewarded), []),
        (
            lambda c: decisions.insert_decisions(
                c, "m", [
                    Decision("dropped", "g", "e", "stale", 1, details={"by": 2}), Decision("deleted", "g", "e"),
                    Decision("occupied", "g", batch=0, entry=0),
                ],
            ),
            [
                ("episode.dropped", "e", "g", {"reason": "stale", "batch": 1, "by": 2}),
                ("group.occupied", "", "g", {"batch": 0, "entry": 0}),
            ],
        ),
        (
            lambda c: ledger.insert_lease(c, LEASE, 10.0),
            [("batch.leased", "", "", {"lease_id": "l", "batch": 1, "fence": 3, "consumer": "t"})],
        ),
        (
            lambda c: ledger.end_lease(c, "m", 3, "acked", "c-1"),
            [("batch.acked", "", "", {"lease_id": "l", "batch": 1, "fence": 3, "consumer": "t", "checkpoint": "c-1"})],
        ),
        (lambda c: ledger.end_lease(c, "m", 99, "acked", "c-1"), []),
        (
            lambda c: (ledger.insert_lease(c, later, 10.0), ledger.skip_leases(c, "m", 2)),
            [
                ("batch.leased", "", "", {"lease_id": "l4", "batch": 1, "fence": 4, "consumer": "t"}),
                ("batch.skipped", "", "", {"lease_id": "l4", "batch": 1, "fence": 4, "consumer": "t"}),
            ],
        ),
        (
            lambda c: ledger.insert_version(c, {"model": "m", "version": 1, "parent": 0, "path": "p", "state": "updating"}),
            [("version.published", "", "", {"version": 1, "parent": 0})],
        ),
        (
            lambda c: ledger.set_version(c, "m", 1, "failed", report, "it diverges"),
            [("version.failed", "", "", {"version": 1, "report": report, "bad": "it diverges"})],
        ),
    ]  # fmt: skip
    assert committer.commit([write for write, _ in changes]) == [
        (result, None) for result in (None,) * 8 + ((None, None),) + (None,) * 2
    ]
    found = stored(engine)
    assert [(e.kind, e.episode, e.group, e.data) for e in found] == [e for _, some in changes for e in some]
    assert {e.model for e in found} == {"m"}
    assert all(one.id < other.id and one.at <= other.at for one, other in itertools.pairwise(found))


def test_a_transaction_of_many_changes_writes_its_events_in_one_statement(
    engine: Engine, committer: Committer
) -> None:
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    committer.commit([emit(f"k.{n}") for n in range(20)])
    assert sum("INSERT INTO events" in statement for statement in statements) == 1
    assert [e.kind for e in stored(engine)] == [f"k.{n}" for n in range(20)]


def test_a_change_that_fails_has_no_event_and_its_neighbors_do(engine: Engine, committer: Committer) -> None:
    def fail(connection: Connection) -> None:
        emit("never.was")(connection)
        raise ValueError("its own fault")

    outcomes = committer.commit([emit("a.b"), fail, emit("c.d")])
    assert [str(error or "") for _, error in outcomes] == ["", "its own fault", ""]
    assert [e.kind for e in stored(engine)] == ["a.b", "c.d"]


def test_an_event_that_cannot_be_stored_takes_only_its_own_change_back(
    engine: Engine, committer: Committer
) -> None:
    def impossible(connection: Connection) -> None:
        episodes.insert_episode(connection, episode("e"))
        emit("k.x", data={"not": object()})(connection)

    outcomes = committer.commit([emit("a.b"), impossible])
    assert [error is None for _, error in outcomes] == [True, False]
    assert [e.kind for e in stored(engine)] == ["a.b"]
    with engine.connect() as connection:
        assert episodes.episode(connection, "e") is None


CHOICES = [
    EventFilter(),
    EventFilter(kinds=("episode",)),
    EventFilter(kinds=("episode.closed", "batch")),
    EventFilter(kinds=("epi",)),
    EventFilter(kinds=("episode.close",)),
    EventFilter(models=("b",)),
    EventFilter(models=()),
    EventFilter(episode="e1"),
    EventFilter(group="g%", kinds=("group",)),
]


@pytest.mark.parametrize("wanted", CHOICES)
def test_a_choice_means_the_same_in_sql_and_in_memory(engine: Engine, wanted: EventFilter) -> None:
    kinds = ("episode.closed", "episode.opened", "episodes.x", "group.closed", "batch.acked")
    all_of_them = [
        Event(kind, model, episode, group)
        for kind in kinds
        for model in ("a", "b")
        for episode in ("", "e1")
        for group in ("g%", "gx")
    ]
    with engine.begin() as connection:
        events.insert_events(connection, all_of_them)
    everything = stored(engine)
    chosen = [e for e in everything if wanted.has(e)]
    assert stored(engine, 0, wanted) == chosen
    with engine.connect() as connection:
        assert events.before(connection, 10**9, 3, wanted) == chosen[-3:]
    by_hand = {0: 40, 1: 16, 2: 16, 3: 0, 4: 0, 5: 20, 6: 0, 7: 20, 8: 4}
    assert len(chosen) == by_hand[CHOICES.index(wanted)]


def test_the_oldest_are_forgotten_in_portions_and_no_id_is_used_twice(engine: Engine) -> None:
    with engine.begin() as connection:
        assert events.extent(connection) == Extent(1, 0)
        assert events.forget(connection, 2) == 0
        events.insert_events(connection, [Event("k.x", "m") for _ in range(10)])
        assert events.extent(connection) == Extent(1, 10)
        assert [events.forget(connection, 2, limit=5) for _ in range(3)] == [5, 3, 0]
        assert events.extent(connection) == Extent(9, 10)
        connection.execute(delete(EventRow))
    with engine.begin() as connection:
        events.insert_events(connection, [Event("k.x", "m")])
    assert [e.id for e in stored(engine)] == [11]


async def test_the_duty_leaves_the_newest_and_writes_nothing_without_need(store_url: str) -> None:
    commits: list[int] = []
    opened = Database.open(
        StoreSettings(url=store_url), on_commit=lambda writes, _seconds: commits.append(writes)
    )
    database = await opened
    await database.submit(emit(*(f"k.{n}" for n in range(2_500))))
    await database.settled()
    commits.clear()
    await retention.forget_events(database, 10)
    assert await database.read(events.extent) == Extent(2_491, 2_500)
    assert len(commits) == 3
    await retention.forget_events(database, 10)
    assert len(commits) == 3
    await database.close()


@pytest.mark.usefixtures("idle")
async def test_a_successors_events_come_after_all_of_its_predecessor(store_url: str) -> None:
    """A reader that has seen an id never finds a lower one afterwards: the successor waits for the transaction in flight."""
    one, other = [await Database.open(StoreSettings(url=store_url)) for _ in range(2)]
    seen: list[int] = []
    succeeding: list[Any] = []
    is_postgres = store_url.startswith("postgresql")

    def succeed(connection: Connection) -> None:
        assert coordination.claim(connection, "other", "http://other", 100.0, None) == 2
        emit("by.other")(connection)

    def in_flight(connection: Connection) -> None:
        events._insert(connection, [Event("by.one", "m")])  # its id is given out, and no reader sees it
        if is_postgres and not succeeding:
            other._loop.call_soon_threadsafe(lambda: succeeding.append(other.submit(succeed)))
            wait_for_a_lock(store_url)
            reading = connect(store_url, 1)
            with reading.connect() as looking:
                seen.append(events.newest(looking))
            reading.dispose()

    await one.submit(lambda c: coordination.claim(c, "one", "http://one", 100.0, 0))
    await one.fenced(1).submit(in_flight)
    await (succeeding[0] if succeeding else other.submit(succeed))
    assert seen == ([0] if is_postgres else [])
    found = await one.read(lambda c: events.after(c, 0, 10))
    assert [e.kind for e in found] == ["by.one", "by.other"]
    with pytest.raises(Fenced):
        await one.fenced(1).submit(emit("by.one.too.late"))
    assert await one.read(events.newest) == found[-1].id
    await one.close()
    await other.close()
