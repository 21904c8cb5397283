"""A real store whose commits come when a test triggers them, and what survives a crash.

The real `Committer` commits, on a real SQLite or PostgreSQL; only the writer's thread is the test's own.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, text

from gateway.config import StoreSettings
from gateway.store import coordination
from gateway.store.commits import Committer, Outcome
from gateway.store.connections import begin_reading, connect
from gateway.store.database import Database
from gateway.store.models import Base
from gateway.store.schema import bring_up_to_date
from tests.faults.virtual.clock import Clock
from tests.harness.servers import PostgresServer, postgres_server

T = TypeVar("T")
LEASE_S = 5.0
_CONNECTIONS = 200
"""More than one for each process there ever is in a run, and one that reads."""
_numbers = itertools.count()


class HandDatabase(Database):
    """One process's connection to the store. What it was given and has not committed is gone when the process dies."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._committer = Committer(self._engine)
        self._hand_loop = loop
        self._writes: deque[tuple[Callable[[Connection], Any], asyncio.Future[Any]]] = deque()
        self.at_once = False
        """Every write is committed as soon as it is given."""
        self.on_committed: Callable[[], None] = lambda: None

    @property
    def healthy(self) -> bool:
        return True

    @property
    def reachable(self) -> bool:
        return True

    @property
    def pending(self) -> int:
        return len(self._writes)

    def check(self) -> None:
        self.check_write()

    def check_write(self) -> None:
        return

    def put(self, write: Callable[[Connection], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._hand_loop.create_future()
        self._writes.append((write, future))
        if self.at_once:
            self._hand_loop.call_soon(self.commit)
        return future

    async def read(self, query: Callable[[Connection], T]) -> T:
        await asyncio.sleep(0)
        with self._engine.connect() as connection:
            begin_reading(connection)
            found = query(connection)
        await asyncio.sleep(0)
        return found

    def commit(self, count: int | None = None) -> None:
        """Commit the first `count` writes, or all, in one transaction."""
        size = min(len(self._writes), len(self._writes) if count is None else count)
        group = [self._writes.popleft() for _ in range(size)]
        if not group:
            return
        for (_, future), (result, error) in zip(group, self._commit(group), strict=True):
            if future.cancelled():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        self.on_committed()

    def _commit(self, group: list[tuple[Callable[[Connection], Any], Any]]) -> list[Outcome]:
        return self._committer.commit([write for write, _ in group])

    def die(self) -> None:
        """Drop what the process had not committed."""
        self._writes.clear()
        self._committer.close()

    def look(self, query: Callable[[Connection], T]) -> T:
        """Read the committed rows."""
        with self._engine.connect() as connection:
            return query(connection)

    def claim(self, holder: str) -> int:
        """Take the coordinator's place, and return its fence."""
        (found,) = self._committer.commit(
            [lambda c: coordination.claim(c, holder, f"http://{holder}", LEASE_S, None)]
        )
        assert found[0] is not None, found[1]
        return int(found[0])


def open_store(url: str, clock: Clock | None = None) -> Engine:
    """Return connections to a store, for all processes. `clock`: SQLite's clock too."""

    def prepare(connection: Any, record: Any) -> None:
        _careless(connection, record)
        if clock is not None:
            connection.create_function("julianday", 1, lambda _now: 2440587.5 + clock.now / 86400.0)

    engine = connect(url, _CONNECTIONS)
    event.listen(engine, "connect", prepare)
    return engine


def _careless(connection: Any, _record: Any) -> None:
    """Wait for no disk: only the gateway crashes here."""
    if type(connection).__module__.startswith("sqlite3"):
        connection.execute("PRAGMA synchronous=OFF")


@cache
def _template() -> Path:
    path = Path(mkdtemp(prefix="headgate-machines-")) / "empty.db"
    url = f"sqlite:///{path}"
    engine = create_engine(url)
    engine.dispose()
    made = connect(url, 1)
    bring_up_to_date(made, StoreSettings(url=url))
    with made.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    made.dispose()
    return path


@contextmanager
def sqlite_store() -> Iterator[str]:
    """Yield the URL of an empty store."""
    path = _template().with_name(f"{next(_numbers)}.db")
    shutil.copy(_template(), path)
    try:
        yield f"sqlite:///{path}"
    finally:
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()


class Postgres:
    """One database that is emptied for every run."""

    server: PostgresServer | None = None
    url = ""

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[None]:
        """While the tests that need it run."""
        with postgres_server() as server:
            cls.server = server
            cls.url = server.url(server.new_database())
            engine = connect(cls.url, 1)
            bring_up_to_date(engine, StoreSettings(url=cls.url))
            engine.dispose()
            try:
                yield
            finally:
                cls.server = None

    @classmethod
    @contextmanager
    def store(cls) -> Iterator[str]:
        """Yield the URL of an empty store."""
        engine = connect(cls.url, 1)
        tables = ", ".join(f'"{table}"' for table in Base.metadata.tables)
        with engine.begin() as connection:
            connection.execute(text(f"TRUNCATE {tables}"))
        engine.dispose()
        yield cls.url
