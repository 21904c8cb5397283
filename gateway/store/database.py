"""The connection to SQL, and the one writer.

Every write is a function of a synchronous connection. Writes are committed in the order in which they were submitted, many in
one transaction (group commit): durability costs one fsync for all that wait. A write that fails is taken back alone, and only
its submitter hears of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.errors import Unavailable
from gateway.settings import StoreSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
Write = Callable[[Connection], Any]
_MAX_GROUP = 256


class Database:
    """Open it with `open`, close it with `close`."""

    def __init__(self, settings: StoreSettings, engine: AsyncEngine) -> None:
        self._settings = settings
        self._engine = engine
        self._pending: asyncio.Queue[tuple[Write, asyncio.Future[Any]]] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, settings: StoreSettings) -> Database:
        """Connects, brings the schema to its newest form, and starts the writer."""
        url = make_url(settings.url)
        if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
            Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
        engine = create_async_engine(url)
        if url.get_backend_name() == "sqlite":
            event.listen(engine.sync_engine, "connect", _configure_sqlite)
        async with engine.begin() as connection:
            await connection.run_sync(_migrate)
        database = cls(settings, engine)
        database._writer = asyncio.create_task(database._write_forever(), name="database-writer")
        return database

    async def close(self) -> None:
        """Commits what was submitted and disconnects."""
        if self._writer is not None:
            if not self._writer.done():
                await self._pending.join()
            self._writer.cancel()
            await asyncio.wait({self._writer})
        await self._engine.dispose()

    @property
    def healthy(self) -> bool:
        """Whether writes are still committed."""
        return self._writer is not None and not self._writer.done()

    def check(self) -> None:
        """Raises Unavailable if a write would be refused now."""
        if not self.healthy:
            raise Unavailable("the database writer has ended", retry_after=10.0, code="store_down")
        if self._pending.qsize() >= self._settings.max_pending:
            raise Unavailable("the database is too far behind", retry_after=5.0, code="store_busy")

    def submit(self, write: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Queues a write; the future is done once it is committed. Raises Unavailable when too many wait."""
        self.check()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.put_nowait((write, future))
        return future

    async def settled(self) -> None:
        """Waits until every write submitted so far is committed."""
        await self.submit(_nothing)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Runs a query that changes nothing."""
        async with self._engine.connect() as connection:
            return await connection.run_sync(query)

    async def _write_forever(self) -> None:
        while True:
            group = [await self._pending.get()]
            while len(group) < _MAX_GROUP and not self._pending.empty():
                group.append(self._pending.get_nowait())
            try:
                await self._commit(group)
            finally:
                for _ in group:
                    self._pending.task_done()

    async def _commit(self, group: list[tuple[Write, asyncio.Future[Any]]]) -> None:
        try:
            async with self._engine.begin() as connection:
                results = await connection.run_sync(lambda c: [write(c) for write, _ in group])
        except Exception as error:
            if len(group) > 1:  # one of them is to blame: let each stand alone
                for item in group:
                    await self._commit([item])
                return
            _settle(group[0][1], error=error)
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                log.error("the database connection was lost: %s", error)
            return
        for (_, future), result in zip(group, results, strict=True):
            _settle(future, result)


def _nothing(_connection: Connection) -> None:
    return


def _settle(future: asyncio.Future[Any], result: Any = None, error: Exception | None = None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


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


def _migrate(connection: Connection) -> None:
    config = _alembic()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations"))
    return config
