"""Statements about the stream of events, which watchers read.

Invariants:

- an event is committed in the transaction of the change that it reports, or not at all. The events of a whole
  transaction are inserted at its end, in one statement (`gathered`): an event costs its change no round trip of its
  own;
- ids grow in the order of commits, so a reader who has read up to an id misses nothing by asking for later ones. Only
  the coordinator writes events, by its one connection, and under its fence: a successor's first transaction waits until
  the last one of its predecessor has ended (`coordination.check` and `claim` lock the same row);
- an id is never used twice, even after its event was deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Select, Table, delete, func, insert, or_, select

from gateway.store.clock import NOW
from gateway.store.columns import begins_with
from gateway.store.models import EventRow

_TABLE = cast(Table, EventRow.__table__)
_COLUMNS = _TABLE.c
_INSERT = insert(_TABLE).values(at=NOW)
_GATHERED = "headgate_events"
"""The key under which a connection keeps the events of its transaction."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `id` and `at` are given by the database."""

    kind: str
    """`SUBJECT.WHAT`, such as `episode.closed`; docs/topics/events.md lists them."""
    model: str
    episode: str = ""
    """The episode's id; empty: it is not about one."""
    group: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    id: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class EventFilter:
    """A filter of events. A field that is None or empty matches all."""

    kinds: tuple[str, ...] = ()
    """Subjects (`episode`) or whole kinds (`episode.closed`)."""
    models: tuple[str, ...] | None = None
    episode: str | None = None
    group: str | None = None

    def has(self, event: Event) -> bool:
        """Return true if an event passes the filter."""
        return (
            (self.models is None or event.model in self.models)
            and (self.episode is None or event.episode == self.episode)
            and (self.group is None or event.group == self.group)
            and (not self.kinds or any(f"{event.kind}.".startswith(f"{kind}.") for kind in self.kinds))
        )

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the filter in SQL."""
        found: list[ColumnElement[bool]] = []
        if self.models is not None:
            found.append(_COLUMNS.model.in_(self.models))
        if self.episode is not None:
            found.append(_COLUMNS.episode_id == self.episode)
        if self.group is not None:
            found.append(_COLUMNS.group_id == self.group)
        if self.kinds:
            of_kind = (or_(_COLUMNS.kind == k, begins_with(_COLUMNS.kind, f"{k}.")) for k in self.kinds)
            found.append(or_(*of_kind))
        return found


@dataclass(frozen=True, slots=True)
class Extent:
    """The range of stored events: all ids from `oldest` to `newest`; (1, 0) if there never was one."""

    oldest: int
    newest: int

    @property
    def size(self) -> int:
        """The number of events, if no transaction was rolled back on the way."""
        return self.newest - self.oldest + 1


EVERYTHING = EventFilter()


def insert_events(connection: Connection, events: Sequence[Event]) -> None:
    """Add events to this transaction: they are inserted at its end within `gathered`, otherwise immediately."""
    gathered: list[Event] | None = connection.info.get(_GATHERED)
    if gathered is None:
        _insert(connection, events)
    else:
        gathered.extend(events)


@contextmanager
def gathered(connection: Connection) -> Iterator[None]:
    """Wrap the changes of a transaction: inserts all their events once they are done."""
    events: list[Event] = []
    connection.info[_GATHERED] = events
    try:
        yield
        _insert(connection, events)
    finally:
        connection.info.pop(_GATHERED, None)


def _insert(connection: Connection, events: Sequence[Event]) -> None:
    rows = [
        {
            "kind": event.kind,
            "model": event.model,
            "episode_id": event.episode,
            "group_id": event.group,
            "data": event.data,
        }
        for event in events
    ]
    if rows:
        connection.execute(_INSERT, rows)


def after(connection: Connection, last: int, limit: int, wanted: EventFilter = EVERYTHING) -> list[Event]:
    """Return the first events after an id, in order."""
    query = _chosen(wanted).where(_COLUMNS.id > last).order_by(_COLUMNS.id).limit(limit)
    return _read(connection, query)


def before(connection: Connection, first: int, limit: int, wanted: EventFilter = EVERYTHING) -> list[Event]:
    """Return the last events before an id, in order."""
    query = _chosen(wanted).where(_COLUMNS.id < first).order_by(_COLUMNS.id.desc()).limit(limit)
    return _read(connection, query)[::-1]


def newest(connection: Connection) -> int:
    """Return the newest event's id; 0 if there is none."""
    return connection.scalar(select(func.max(_COLUMNS.id))) or 0


def oldest(connection: Connection) -> int:
    """Return the id of the oldest kept event; 0 if there is none."""
    return connection.scalar(select(func.min(_COLUMNS.id))) or 0


def extent(connection: Connection) -> Extent:
    """Return the range of stored events."""
    last = newest(connection)
    return Extent(oldest(connection) or last + 1, last)


def forget(connection: Connection, keep: int, limit: int = 1000) -> int:
    """Delete some of the events beyond the newest `keep`, the oldest first. Return their number."""
    stored = extent(connection)
    last = min(stored.newest - keep, stored.oldest + limit - 1)
    if last < stored.oldest:
        return 0
    return connection.execute(delete(_TABLE).where(_COLUMNS.id <= last)).rowcount


def _chosen(wanted: EventFilter) -> Select[Any]:
    return select(*_COLUMNS).where(*wanted.conditions())


def _read(connection: Connection, query: Select[Any]) -> list[Event]:
    return [
        Event(row.kind, row.model, row.episode_id, row.group_id, row.data, row.id, row.at)
        for row in connection.execute(query)
    ]
