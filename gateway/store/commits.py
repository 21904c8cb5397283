"""Group commit: many writes in one transaction, each of which stands or fails alone, over a connection that may break.

Owns the writer's connection. Everything here runs in the writer's thread and blocks it.

- **Exactly once.** On PostgreSQL a connection can break while it commits. Every transaction sets this writer's number in the
  table `writers`, which only grows. After a break the group is run again, and its first statement raises the number only if none
  of the tries before got through: the row's lock makes it wait for a try that the server is still busy with. If one got through,
  its results stand. (`pg_xact_status()` cannot be used instead: a server that crashed gives the numbers of transactions that it
  lost to others.)
- **A function may run more than once**: after a lost connection, a deadlock, or the failure of another write. What it did to
  the database before is rolled back then; it must do nothing else.
- **Outages.** While the database cannot be reached the group waits, and with it all later ones: their order is kept.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from gateway.store import coordination, events
from gateway.store.connections import (
    begin_writing,
    delays,
    is_broken,
    is_disconnected,
    is_failed,
    is_full,
    is_retryable,
    refusal,
)
from headgate.errors import Unavailable

log = logging.getLogger(__name__)

Write = Callable[[Connection], Any]
Outcome = tuple[Any, Exception | None]
"""The result of a write, or the error with which it alone failed."""
_SLOW_S = 10.0
_FORGOTTEN_S = 7 * 86_400
_CLOCK = "EXTRACT(EPOCH FROM clock_timestamp())"
_MARK = text(
    f"INSERT INTO writers (id, number, at) VALUES (:id, :number, {_CLOCK}) "
    "ON CONFLICT (id) DO UPDATE SET number = :number, at = EXCLUDED.at WHERE writers.number < :first"
)
_FORGET = text(f"DELETE FROM writers WHERE id = :id OR at < {_CLOCK} - {_FORGOTTEN_S}")


@dataclass(frozen=True, slots=True)
class Rows:
    """A row to insert. Adjacent writes of one kind become one multi-row statement, which costs little more than a single
    row's."""

    insert: Callable[[Connection, list[Any]], None]
    """Receives the values of all writes, in order."""
    row: Any

    def __call__(self, connection: Connection) -> None:
        """Write it alone."""
        self.insert(connection, [self.row])


class _Failed(Exception):
    """One write of the group failed for a reason of its own; the transaction is rolled back."""

    def __init__(self, error: Exception, at: int | None) -> None:
        """`at`: the write's place in the group; None: it is not known which."""
        super().__init__(error)
        self.error = error
        self.at = at


class _Retry(Exception):
    """The transaction must be run again."""

    def __init__(self, error: Exception, *, disconnected: bool, results: list[Any] | None) -> None:
        """`results`: the writes' results, if a commit was attempted and its outcome is unknown."""
        super().__init__(error)
        self.error = error
        self.disconnected = disconnected
        self.results = results


class _Stopped(Exception):
    """The gateway ends, and the database is still away."""


class Committer:
    """One per process. `stop` is called from another thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._id = secrets.token_hex(16)
        self._number = 0
        self._marks = engine.dialect.name == "postgresql"
        self._stop_at: float | None = None
        self._disconnected_since: float | None = None
        self.full = False
        """True if writes wait because the database's disk is full."""
        self._busy_since: float | None = None

    @property
    def reachable(self) -> bool:
        """True if the database does its work in time."""
        busy_since = self._busy_since
        return self._disconnected_since is None and (
            busy_since is None or time.monotonic() - busy_since < _SLOW_S
        )

    def stop(self, within_s: float) -> None:
        """Give up writes that are not committed within this many seconds."""
        self._stop_at = time.monotonic() + within_s

    def close(self) -> None:
        """Disconnect."""
        if self._connection is None:
            return
        try:
            if self._marks:
                with self._connection.begin():
                    self._connection.execute(_FORGET, {"id": self._id})
            self._connection.close()
        except SQLAlchemyError as error:
            log.warning("the writer's mark was left behind: %s", _short(error))

    def commit(self, group: Sequence[Write]) -> list[Outcome]:
        """Commit a group of writes in order, and return their outcomes in order."""
        outcomes: list[Outcome] = []
        rest = list(group)
        while rest:
            try:
                return [*outcomes, *((result, None) for result in self._persist(rest))]
            except _Failed as failed:
                at, error = failed.at, refusal(failed.error)
            except _Stopped:
                return [*outcomes, *((None, _unknown()) for _ in rest)]
            if len(rest) == 1:
                return [*outcomes, (None, error)]
            if at is None:
                return [*outcomes, *(outcome for write in rest for outcome in self.commit([write]))]
            outcomes += [*self.commit(rest[:at]), (None, error)]
            rest = rest[at + 1 :]
        return outcomes

    def _persist(self, group: Sequence[Write]) -> list[Any]:
        """Run the group until it is committed, once. Raises _Failed, with nothing committed."""
        unconfirmed: tuple[int, list[Any]] | None = None
        waits = delays()
        while True:
            self._number += 1
            self._busy_since = time.monotonic()
            try:
                results = self._try(group, unconfirmed)
            except _Retry as retry:
                if retry.results is not None:
                    unconfirmed = (self._number, retry.results)
                self._wait(retry, next(waits))
            else:
                self._is_back()
                return results
            finally:
                self._busy_since = None

    def _try(self, group: Sequence[Write], unconfirmed: tuple[int, list[Any]] | None) -> list[Any]:
        """One transaction. `unconfirmed`: the number and the results of the last try whose COMMIT got no response."""
        results: list[Any] | None = None
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            with self._connection.begin():
                begin_writing(self._connection)
                coordination.begin(self._connection)
                if self._marks and not self._mark(self._connection, unconfirmed):
                    assert unconfirmed is not None
                    return unconfirmed[1]
                with events.gathered(self._connection):
                    results = _run(self._connection, group)
        except Exception as error:
            disconnected = is_disconnected(error) or self._connection is None or is_broken(self._connection)
            if disconnected:
                self._drop()
            if disconnected or is_retryable(error):
                raise _Retry(error, disconnected=disconnected, results=results) from error
            if isinstance(error, _Failed):
                raise
            raise _Failed(error, None) from error
        return results

    def _mark(self, connection: Connection, unconfirmed: tuple[int, list[Any]] | None) -> bool:
        """Raise this writer's number; False if the try without a response was committed after all.

        Afterwards that one, and every one before it, will never be: they would have to change the same row.
        """
        first = unconfirmed[0] if unconfirmed else self._number
        values = {"id": self._id, "number": self._number, "first": first}
        return connection.execute(_MARK, values).rowcount > 0

    def _wait(self, retry: _Retry, delay: float) -> None:
        if self._stop_at is not None and time.monotonic() > self._stop_at:
            raise _Stopped
        self.full = is_full(retry.error)
        if retry.disconnected and self._disconnected_since is None:
            self._disconnected_since = time.monotonic()
            why = "has a full disk" if self.full else "cannot be reached"
            log.error("the database %s, writes wait for it: %s", why, _short(retry.error))
        time.sleep(delay)

    def _is_back(self) -> None:
        if self._disconnected_since is not None:
            log.warning(
                "the database can be written again after %.1f s", time.monotonic() - self._disconnected_since
            )
            self._disconnected_since, self.full = None, False

    def _drop(self) -> None:
        """Give the connection up."""
        if self._connection is None:
            return
        try:
            self._connection.invalidate()
            self._connection.close()
        except Exception as error:
            log.warning("a connection to the database was closed after an error: %s", _short(error))
        self._connection = None


def _run(connection: Connection, group: Sequence[Write]) -> list[Any]:
    """Return the result of each write. Raises _Failed for a write that fails for reasons of its own, and the connection's error
    otherwise."""
    results: list[Any] = []
    for _, neighbors in groupby(group, lambda write: write.insert if isinstance(write, Rows) else write):
        writes = list(neighbors)
        at = len(results) if len(writes) == 1 else None
        try:
            results += _run_alike(connection, writes)
        except Exception as error:
            if is_disconnected(error) or is_retryable(error) or is_broken(connection):
                raise
            raise _Failed(error, at) from error
        if is_failed(connection):
            raise _Failed(RuntimeError("a write went on after one of its statements had failed"), at)
    return results


def _run_alike(connection: Connection, writes: Sequence[Write]) -> list[Any]:
    """Run adjacent writes of one kind: rows by one statement, other functions one after the other."""
    rows = [write for write in writes if isinstance(write, Rows)]
    if not rows:
        return [write(connection) for write in writes]
    rows[0].insert(connection, [write.row for write in rows])
    return [None] * len(rows)


def _short(error: Exception) -> str:
    """Return the database's own words, in one line, without the statement and its values."""
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def _unknown() -> Unavailable:
    return Unavailable(
        "the gateway stopped while the database could not be reached: it is not known whether this was stored",
        retry_after=10.0,
        code="store_down",
    )
