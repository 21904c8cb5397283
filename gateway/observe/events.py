"""The feed of events for all watchers: stored events from SQL, and new ones.

Every process of a cluster has one, and reads SQL alone, so a watcher may ask any of them. Invariants:
- a watcher gets every event that it chose, in order and once, from its cursor on. Where events are missing because SQL has
  forgotten them, or does not know the cursor, it gets a `gap` that names them;
- the newest events are kept in memory (`_Ring`), each written as bytes once for all watchers, and only for watchers: one
  reader asks SQL for them. A watcher that reads slower than they come falls out of the ring and goes on from SQL, at its own
  pace. So a watcher holds one piece of its stream at most, however slow it is;
- the more watch, the longer events are gathered before they are sent: a watcher costs a piece that is written, not its events.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from gateway.store import events as statements
from gateway.store.columns import to_json
from gateway.store.database import Database
from gateway.store.events import EVERYTHING, Event, EventFilter
from headgate.errors import Busy, Unavailable

log = logging.getLogger(__name__)
_MAX_WATCHERS = 1_000
"""Streams of events that a process serves: each costs memory and a wake-up for each event."""

T = TypeVar("T")

_PAGE = 500
"""Events that one query reads."""
_PIECE = 256 * 1024
"""The approximate number of bytes that a watcher receives in one piece."""
_RING_EVENTS = 5_000
_RING_BYTES = 8 * 2**20
_GATHER_S, _GATHER_EACH_S, _GATHER_MOST_S = 0.1, 0.005, 1.0
"""Seconds between two looks at SQL: at least, for each watcher, and at most."""
_SILENT = 1_000
"""After this many events without one for a watcher, it receives the id that the stream has reached, so that it need not read
them again."""
_READING_AT_ONCE = 2
"""Watchers that read from SQL at the same time; all watchers share the readers of the database."""


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of a stream: after an id, or with the last few events that match; without either, with the next event."""

    after: int | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """Requested events that a watcher does not get: the ids from `first` to `until`, or an unknown cursor."""

    why: str
    """`forgotten`: SQL keeps them no more. `unknown`: there never was an event with the id of the cursor in this database."""
    first: int
    until: int
    after: int
    """The stream continues after this id."""

    def written(self) -> bytes:
        """Return the gap as a server-sent event."""
        gap = {
            "id": self.after,
            "kind": "gap",
            "data": {"why": self.why, "from": self.first, "to": self.until},
        }
        return b"id: %d\nevent: gap\ndata: %s\n\n" % (self.after, to_json(gap).encode())


@dataclass(frozen=True, slots=True)
class Page:
    """A look at SQL."""

    events: Sequence[Event]
    gap: Gap | None
    until: int
    """Everything up to this id has been looked at."""
    complete: bool
    """True if there is nothing after it yet."""


def read_page(connection: Connection, last: int, wanted: EventFilter) -> Page:
    """Return the chosen events after an id, or the first of them."""
    stored, gap = statements.extent(connection), None
    if last > stored.newest:
        last, gap = stored.oldest - 1, Gap("unknown", stored.newest + 1, last, stored.oldest - 1)
    elif last + 1 < stored.oldest:
        gap = Gap("forgotten", last + 1, stored.oldest - 1, stored.oldest - 1)
        last = stored.oldest - 1
    found = statements.after(connection, last, _PAGE, wanted)
    whole = len(found) < _PAGE
    return Page(found, gap, stored.newest if whole else found[-1].id, whole)


def first_id(connection: Connection, start: Start, wanted: EventFilter) -> int:
    """Return the id after which a stream begins."""
    if start.after is not None:
        return start.after
    newest = statements.newest(connection)
    found = statements.before(connection, newest + 1, start.last, wanted) if start.last else []
    return found[0].id - 1 if found else newest


def written(event: Event) -> bytes:
    """Return an event as a server-sent event."""
    shown: dict[str, Any] = {"id": event.id, "at": event.at, "kind": event.kind, "model": event.model}
    if event.episode:
        shown["episode"] = event.episode
    if event.group:
        shown["group"] = event.group
    data = to_json({**shown, "data": event.data}).encode()
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.kind.encode(), data)


class _Ring:
    """The newest events: all of those after `base` up to `newest`."""

    def __init__(self, newest: int) -> None:
        self.base = self.newest = newest
        self._before = newest
        """The newest id before the ring has grown last."""
        self._ids: list[int] = []
        self._events: list[tuple[Event, bytes]] = []
        self._bytes = 0
        self._pieces: dict[EventFilter, tuple[bytes, int]] = {}
        """By filter, the bytes of the newest events, for readers who have all before them."""

    def grow(self, events: Sequence[Event], newest: int) -> None:
        """Add the next events; the oldest leave."""
        self._before, self.newest = self.newest, newest
        self._pieces.clear()
        for event in events:
            data = written(event)
            self._ids.append(event.id)
            self._events.append((event, data))
            self._bytes += len(data)
        dropped = 0
        while len(self._ids) - dropped > _RING_EVENTS or self._bytes > _RING_BYTES:
            self._bytes -= len(self._events[dropped][1])
            self.base = self._ids[dropped]
            dropped += 1
        del self._ids[:dropped], self._events[:dropped]

    def since(self, last: int, wanted: EventFilter) -> tuple[bytes, int]:
        """Return the next piece after an id that is not before `base`, and its last id. A reader of SQL may be ahead."""
        if last >= self.newest:
            return b"", last
        if last != self._before:
            return self._piece(last, wanted)
        if wanted not in self._pieces:
            self._pieces[wanted] = self._piece(last, wanted)
        return self._pieces[wanted]

    def _piece(self, last: int, wanted: EventFilter) -> tuple[bytes, int]:
        found: list[bytes] = []
        size = 0
        for event, data in self._events[bisect.bisect_right(self._ids, last) :]:
            if not wanted.has(event):
                continue
            found.append(data)
            size += len(data)
            if size >= _PIECE:
                return b"".join(found), event.id
        return b"".join(found), self.newest


class EventFeed:
    """The watchers of this process. Close it to end their streams."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watchers = 0
        self._closed = False
        self._ring: _Ring | None = None
        self._reader: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._reading = asyncio.Semaphore(_READING_AT_ONCE)

    @property
    def watchers(self) -> int:
        """The number of streams."""
        return self._watchers

    async def close(self) -> None:
        """End every stream, and accept no more."""
        self._closed = True
        self._wake()
        await self._stop_reading()

    def check(self) -> None:
        """Raise Unavailable or Busy if no further watcher is accepted."""
        if self._closed:
            raise Unavailable("this gateway process is being stopped", retry_after=1.0, code="stopping")
        if self._watchers >= _MAX_WATCHERS:
            message = f"{self._watchers} streams of events are open, as many as a process serves"
            raise Busy(message, retry_after=5.0, code="too_many_watchers")

    async def watch(
        self, wanted: EventFilter, start: Start, wait_s: float | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the stream of one watcher: whole server-sent events, several in a piece. It ends after `wait_s`, once nothing is
        left."""
        self.check()
        until = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        with self._counted():
            last = reported = await self._read(partial(first_id, start=start, wanted=wanted))
            yield _place(last)
            while not self._closed:
                news, ring = self._news, self._ring
                if ring is None or last < ring.base:
                    page = await self._read(partial(read_page, last=last, wanted=wanted))
                    piece, last, whole = _bytes_of(page), page.until, page.complete
                else:
                    piece, last = ring.since(last, wanted)
                    whole = last >= ring.newest
                if piece:
                    reported = last
                    yield piece
                elif last - reported >= _SILENT:
                    reported = last
                    yield _place(last)
                if whole and not await self._more(news, until):
                    return

    async def _more(self, news: asyncio.Event, until: float | None) -> bool:
        """Wait for news; False if the time is up before they come. Raises the reader's error."""
        if until is not None and asyncio.get_running_loop().time() >= until:
            return False
        if self._reader is None:
            self._failure = None
            self._reader = asyncio.create_task(self._follow(), name="read-events")
        if not news.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await news.wait()
        if self._failure is not None:
            raise self._failure
        return news.is_set()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers and self._reader is not None:
                self._reader.cancel()
                self._reader = self._ring = None

    async def _read(self, query: Callable[[Connection], T]) -> T:
        async with self._reading:
            return await self._database.read(query)

    async def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
            self._reader = self._ring = None

    async def _follow(self) -> None:
        """Keep the ring while there are watchers."""
        try:
            ring = self._ring = _Ring(await self._database.read(statements.newest))
            self._wake()
            while True:
                look = partial(read_page, last=ring.newest, wanted=EVERYTHING)
                page = await self._database.read(look)
                if page.gap is not None:  # SQL forgot faster than this process read
                    ring = self._ring = _Ring(page.gap.after)
                if page.events or page.gap is not None:
                    ring.grow(page.events, page.until)
                    self._wake()
                if page.complete:
                    await self._gather()
        except Exception as error:
            log.warning("the streams of events end, and may be resumed: %s", error)
            self._failure = error
            self._reader = self._ring = None
            self._wake()

    async def _gather(self) -> None:
        await asyncio.sleep(min(_GATHER_MOST_S, max(_GATHER_S, self._watchers * _GATHER_EACH_S)))

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _place(last: int) -> bytes:
    """Return the position of a stream, which is not an event for clients: they keep the id."""
    return b": up to %d\nid: %d\n\n" % (last, last)


def _bytes_of(page: Page) -> bytes:
    gap = b"" if page.gap is None else page.gap.written()
    return gap + b"".join(written(event) for event in page.events)
