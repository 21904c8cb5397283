"""The connection to SQL, and the one writer.

Every query is a function of a synchronous connection. Writes are committed by one thread in the order in which they were
submitted, many in one transaction (group commit): durability costs one fsync for all that wait. A write that fails is taken back
alone, and only its submitter hears of it. Reads run in a few threads of their own. The event loop is woken once per transaction.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from gateway.errors import Unavailable
from gateway.settings import StoreSettings
from gateway.store import coordination

log = logging.getLogger(__name__)

T = TypeVar("T")
Write = Callable[[Connection], Any]
_MAX_GROUP = 256
_READERS = 4


class Database:
    """Open it with `open`, close it with `close`."""

    def __init__(self, settings: StoreSettings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._waiting = 0
        """Writes that were submitted and are not settled."""
        self._open = True
        self._readers = ThreadPoolExecutor(_READERS, "database-reader")
        self._writer = threading.Thread(target=self._write_forever, name="database-writer", daemon=True)

    @classmethod
    async def open(cls, settings: StoreSettings) -> Database:
        """Connects, brings the schema to its newest form, and starts the writer."""
        url = _driver(make_url(settings.url))
        if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
            Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url, json_serializer=_to_json, json_deserializer=orjson.loads)
        if url.get_backend_name() == "sqlite":
            event.listen(engine, "connect", _configure_sqlite)
        await asyncio.to_thread(_migrate, engine)
        database = cls(settings, engine)
        database._writer.start()
        return database

    async def close(self) -> None:
        """Commits what was submitted and disconnects."""
        if self._open:
            self._open = False
            self._queue.put(None)
        await asyncio.to_thread(self._writer.join)
        self._readers.shutdown()
        self._engine.dispose()

    @property
    def healthy(self) -> bool:
        """Whether writes are still committed."""
        return self._open and self._writer.is_alive()

    def check(self) -> None:
        """Raises Unavailable if a write would be refused now."""
        if not self.healthy:
            raise Unavailable("the database writer has ended", retry_after=10.0, code="store_down")
        if self._waiting >= self._settings.max_pending:
            raise Unavailable("the database is too far behind", retry_after=5.0, code="store_busy")

    def submit(self, write: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Queues a write; the future is done once it is committed. Raises Unavailable when too many wait."""
        self.check()
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting += 1
        self._queue.put((write, future))
        return future

    async def settled(self) -> None:
        """Waits until every write submitted so far is committed."""
        await self.submit(_nothing)

    def fenced(self, fence: int) -> Database:
        """The same database for the coordinator with this fence: once there is another, every write fails with Fenced."""
        return _Fenced(self, fence)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Runs a query that changes nothing."""
        return await self._loop.run_in_executor(self._readers, self._read, query)

    def _read(self, query: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return query(connection)

    def _write_forever(self) -> None:
        """The writer's thread, until None is in the queue."""
        more = True
        while more:
            group: list[_Item] = []
            item = self._queue.get()
            while item is not None:
                group.append(item)
                if len(group) == _MAX_GROUP or self._queue.empty():
                    break
                item = self._queue.get()
            more = item is not None
            if group:
                outcomes = self._commit(group)
                self._loop.call_soon_threadsafe(self._settle, group, outcomes)

    def _commit(self, group: list[_Item]) -> list[_Outcome]:
        """What each write answered, or the error that it failed with, alone."""
        try:
            with self._engine.begin() as connection:
                results = [write(connection) for write, _ in group]
        except Exception as error:
            if len(group) > 1:  # one of them is to blame: let each stand alone
                return [outcome for item in group for outcome in self._commit([item])]
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                log.error("the database connection was lost: %s", error)
            return [(None, error)]
        return [(result, None) for result in results]

    def _settle(self, group: list[_Item], outcomes: list[_Outcome]) -> None:
        self._waiting -= len(group)
        for (_, future), (result, error) in zip(group, outcomes, strict=True):
            if future.cancelled():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)


class _Fenced(Database):
    """See `Database.fenced`. Opening and closing are the other one's."""

    def __init__(self, database: Database, fence: int) -> None:
        self._database = database
        self._fence = fence

    @property
    def healthy(self) -> bool:
        return self._database.healthy

    def check(self) -> None:
        self._database.check()

    def submit(self, write: Callable[[Connection], T]) -> asyncio.Future[T]:
        def fenced(connection: Connection) -> T:
            coordination.check(connection, self._fence)
            return write(connection)

        return self._database.submit(fenced)

    async def read(self, query: Callable[[Connection], T]) -> T:
        return await self._database.read(query)


_Item = tuple[Write, asyncio.Future[Any]]
_Outcome = tuple[Any, Exception | None]


def _nothing(_connection: Connection) -> None:
    return


def _driver(url: URL) -> URL:
    """Python's own SQLite, also where a configuration still names the asynchronous wrapper around it."""
    return url.set(drivername="sqlite") if url.get_backend_name() == "sqlite" else url


def _to_json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def _configure_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()


def newest_revision() -> str | None:
    """The revision of the tables that this build reads and writes."""
    return ScriptDirectory.from_config(_alembic()).get_current_head()


def _migrate(engine: Engine) -> None:
    config = _alembic()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations"))
    return config
