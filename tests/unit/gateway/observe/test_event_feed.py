"""The feed of events: every watcher gets what it chose, in order and once, or a gap that names what is missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gateway.config import StoreSettings
from gateway.observe import events as feed_module
from gateway.observe.events import EventFeed, Start
from gateway.store import events as statements
from gateway.store.database import Database
from gateway.store.events import EVERYTHING, Event, EventFilter
from headgate.errors import Busy, Unavailable
from tests.harness.stores import sqlite_store
from tests.harness.waiting import result_of, turns, until, within


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(StoreSettings(url=sqlite_store(tmp_path / "store.db")))
    yield opened
    await opened.close()


@pytest.fixture
async def feed(database: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EventFeed]:
    monkeypatch.setattr(feed_module, "_GATHER_S", 0.001)
    opened = EventFeed(database)
    yield opened
    await opened.close()


async def emit(database: Database, count: int, model: str = "m", kind: str = "k.x", **data: Any) -> None:
    emitted = [Event(kind, model, data=data) for _ in range(count)]
    await database.submit(lambda c: statements.insert_events(c, emitted))


class Watcher:
    """One stream, read as its test wants."""

    def __init__(
        self, feed: EventFeed, wanted: EventFilter = EVERYTHING, wait_s: float | None = None, **start: int
    ) -> None:
        self.stream = feed.watch(wanted, Start(**start), wait_s)
        self.seen: list[Any] = []
        self.places: list[int] = []

    async def piece(self) -> None:
        for block in (await anext(self.stream)).decode().split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            self.places.append(int(fields["id"]))
            if "data" in fields:
                self.seen.append(json.loads(fields["data"]))

    async def come_to(self, last: int) -> list[int]:
        """Read up to an id; return the ids of the events that came."""
        async with within(f"a stream reaches {last}"):
            while not self.places or self.places[-1] < last:
                await self.piece()
        return [event["id"] for event in self.seen]

    async def end(self) -> list[int]:
        async with within("a stream ends"):
            try:
                while True:
                    await self.piece()
            except StopAsyncIteration:
                return [event["id"] for event in self.seen]


async def test_old_and_new_events_are_streamed_once_and_in_order(
    database: Database, feed: EventFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_PAGE", 7)
    monkeypatch.setattr(feed_module, "_PIECE", 500)
    await emit(database, 40)
    watcher = Watcher(feed, after=10)
    assert await watcher.come_to(25) == list(range(11, 32))  # whole pages of seven
    for _ in range(20):
        await emit(database, 3)
    assert await watcher.come_to(100) == list(range(11, 101))
    assert watcher.seen[0] == {
        "id": 11, "at": watcher.seen[0]["at"], "kind": "k.x", "model": "m", "data": {}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("start", "ids"),
    [({}, []), ({"after": 0}, [1, 2, 3, 4]), ({"last": 2}, [3, 4]), ({"last": 9}, [1, 2, 3, 4])],
)
async def test_a_stream_begins_where_it_is_requested_and_ends_with_the_newest_event(
    database: Database, feed: EventFeed, start: dict[str, int], ids: list[int]
) -> None:
    await emit(database, 4)
    assert await Watcher(feed, wait_s=0, **start).end() == ids
    assert feed.watchers == 0


async def test_the_last_few_are_counted_among_the_chosen(database: Database, feed: EventFeed) -> None:
    for model in "abab":
        await emit(database, 1, model)
    assert await Watcher(feed, EventFilter(models=("a",)), wait_s=0, last=2).end() == [1, 3]


def reads_none(feed: EventFeed) -> bool:
    """Return whether no stream reads the database at the moment."""
    return feed._reading._value == feed_module._READING_AT_ONCE


async def test_an_event_is_written_once_for_all_and_everyone_gets_their_own_choice(
    database: Database, feed: EventFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    original = feed_module.written
    monkeypatch.setattr(feed_module, "written", lambda e: written.append(e.id) or original(e))
    choices = [
        EVERYTHING,
        EVERYTHING,
        EventFilter(models=("a",)),
        EventFilter(kinds=("k",)),
        EventFilter(models=("c",)),
    ]
    watchers = [Watcher(feed, choice) for choice in choices]
    tasks = [asyncio.create_task(watcher.come_to(8)) for watcher in watchers[:4]]
    silent = asyncio.create_task(watchers[4].end())
    await until(
        lambda: feed._ring is not None and all(watcher.places for watcher in watchers) and reads_none(feed),
        "every stream has begun, and all read the ring from now on",
    )
    for model in "abab":
        await emit(database, 2, model)
    await asyncio.gather(*tasks[:2], tasks[3])
    await emit(database, 1, "a")
    ids = [await task for task in tasks]
    assert ids == [[*range(1, 9)], [*range(1, 9)], [1, 2, 5, 6, 9], [*range(1, 9)]]
    assert written == list(range(1, 10))
    await feed.close()
    assert await silent == []


async def test_nothing_is_read_without_a_watcher(database: Database, feed: EventFeed) -> None:
    async with aclosing(Watcher(feed).stream) as stream:  # type: ignore[type-var]
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await until(lambda: feed._ring is not None, "the feed is read")
        await emit(database, 1)
        await waiting
        reader = feed._reader
        assert reader is not None
    await until(reader.done, "the reader has ended")
    assert (feed._ring, feed._reader, feed.watchers) == (None, None, 0)
    assert await Watcher(feed, wait_s=0, after=0).end() == [1]


async def test_who_reads_slowly_misses_nothing_that_is_kept(
    database: Database, feed: EventFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_RING_EVENTS", 5)
    slow, quick = Watcher(feed, after=0), Watcher(feed, after=0)
    await emit(database, 1)
    await asyncio.gather(slow.come_to(1), quick.come_to(1))
    for number in range(30):
        await emit(database, 2)
        await quick.come_to(3 + 2 * number)
    assert feed._ring is not None
    assert len(feed._ring._events) == 5
    assert await slow.come_to(61) == list(range(1, 62)) == await quick.come_to(61)


async def test_who_has_read_further_than_the_ring_gets_nothing_twice(
    database: Database, feed: EventFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, read = asyncio.Event(), database.read

    async def newest_comes_late(query: Any) -> Any:
        response = await read(query)
        if query is statements.newest:
            await late.wait()
        return response

    monkeypatch.setattr(database, "read", newest_comes_late)
    await emit(database, 3)
    first = asyncio.create_task(Watcher(feed).come_to(6))
    await until(lambda: feed._reader is not None, "the ring is about to begin with the third event")
    ahead = Watcher(feed, after=0)
    await ahead.come_to(3)
    await emit(database, 2)
    further = Watcher(feed, after=3)
    await further.come_to(5)
    waiting = [asyncio.create_task(watcher.come_to(6)) for watcher in (ahead, further)]
    await turns()
    late.set()
    await until(lambda: feed._ring is not None and feed._ring.newest == 5, "the ring has reached them")
    await emit(database, 1)
    assert [*await asyncio.gather(first, *waiting)] == [[4, 5, 6], [1, 2, 3, 4, 5, 6], [4, 5, 6]]


async def test_the_ring_is_bounded_in_bytes(
    database: Database, feed: EventFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_RING_BYTES", 5_000)
    watcher = Watcher(feed, after=0)
    for number in range(1, 11):
        await emit(database, 1, text="x" * 1_000)
        await watcher.come_to(number)
    await until(lambda: feed._ring is not None and feed._ring.newest == 10, "the ring has all")
    assert feed._ring is not None
    assert 0 < len(feed._ring._events) <= 4
    assert len(watcher.seen) == 10


async def test_what_was_forgotten_is_named_before_and_amid_a_stream(
    database: Database, feed: EventFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_RING_EVENTS", 5)
    await emit(database, 20)
    await database.submit(lambda c: statements.forget(c, 5))
    slow, quick = Watcher(feed, after=3), Watcher(feed)
    assert await slow.come_to(20) == [15, *range(16, 21)]
    gap = {"id": 15, "kind": "gap", "data": {"why": "forgotten", "from": 4, "to": 15}}
    assert slow.seen[0] == gap
    for number in range(21, 41):
        await emit(database, 1)
        await quick.come_to(number)
    await database.submit(lambda c: statements.forget(c, 5))
    await slow.come_to(40)
    assert slow.seen[6] == {"id": 35, "kind": "gap", "data": {"why": "forgotten", "from": 21, "to": 35}}
    assert [event["id"] for event in slow.seen[7:]] == list(range(36, 41))


async def test_a_cursor_of_another_database_is_reported_as_unknown(
    database: Database, feed: EventFeed
) -> None:
    await emit(database, 2)
    watcher = Watcher(feed, wait_s=0, after=500)
    assert await watcher.end() == [0, 1, 2]
    assert watcher.seen[0] == {"id": 0, "kind": "gap", "data": {"why": "unknown", "from": 3, "to": 500}}


async def test_a_stream_without_matches_reports_its_position(
    database: Database, feed: EventFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_SILENT", 10)
    watcher = Watcher(feed, EventFilter(models=("none",)), after=0)
    await emit(database, 30)
    assert await watcher.come_to(30) == []


async def test_closing_ends_every_stream_and_no_other_begins(database: Database, feed: EventFeed) -> None:
    ends = [asyncio.create_task(Watcher(feed).end()) for _ in range(3)]
    await until(lambda: feed.watchers == 3 and feed._ring is not None, "all watch")
    await feed.close()
    assert await asyncio.gather(*ends) == [[], [], []]
    with pytest.raises(Unavailable, match="being stopped"):
        await Watcher(feed).piece()


async def test_more_watchers_than_allowed_are_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.observe.events._MAX_WATCHERS", 1)
    feed = EventFeed(database)
    first = Watcher(feed)
    await first.piece()
    with pytest.raises(Busy, match="1 streams of events are open"):
        feed.check()
    await feed.close()


async def test_a_stream_fails_with_the_database_and_a_new_one_continues(
    database: Database, feed: EventFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Watcher(feed)
    await watcher.piece()
    reading = asyncio.create_task(watcher.piece())
    await until(lambda: feed._ring is not None, "the feed is read")

    async def away(_query: Any) -> None:
        raise Unavailable("the database is away", retry_after=1.0, code="store_down")

    monkeypatch.setattr(database, "read", away)
    with pytest.raises(Unavailable, match="is away"):
        await result_of(reading, "the stream fails")
    monkeypatch.undo()
    assert feed.watchers == 0
    await emit(database, 1)
    again = Watcher(feed, after=watcher.places[-1])
    assert await again.come_to(1) == [1]
