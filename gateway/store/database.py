"""The connection to SQL, and the one writer.

Every query is a function of a synchronous connection. Writes are committed by one thread in the order in which they were
submitted, many in one transaction (group commit, see commits.py): durability costs one fsync for all that wait. A write that
fails is taken back alone, and its submitter gets the error. Reads run in a few threads of their own, each on one snapshot. The
event loop is woken once per transaction.

While the database cannot be reached, writes wait, in their order; reads are tried again for `[store] read_wait_s`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError

from gateway.config import StoreSettings
from gateway.store import coordination
from gateway.store.commits import Committer, Outcome, Write
from gateway.store.connections import begin_reading, connect, delays, is_disconnected, is_retryable, refusal
from headgate.errors import Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_GROUP = 256
_GATHER_S = 0.002
"""Seconds that the writer waits for more, if the last group had several writes: a transaction costs the same for one as for
ten.
"""
_READERS = 4


class Database:
    """Open it with `open`, close it with `close`."""

    def __init__(
        self,
        settings: StoreSettings,
        engine: Engine,
        on_commit: Callable[[int, float], None] = lambda _writes, _seconds: None,
    ) -> None:
        """`on_commit`: called from the writer's thread after every transaction, with its writes and seconds."""
        self._settings = settings
        self._engine = engine
        self._committer = Committer(engine)
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._waiting = 0
        """Writes that were submitted and are not settled."""
        self._on_commit = on_commit
        self._unread = False
        """True if the database was away at the last read."""
        self._open = True
        self._readers = ThreadPoolExecutor(_READERS, "database-reader")
        self._writer = threading.Thread(target=self._write_forever, name="database-writer", daemon=True)

    @classmethod
    async def open(
        cls,
        settings: StoreSettings,
        *,
        migrate: bool = True,
        on_commit: Callable[[int, float], None] = lambda _writes, _seconds: None,
    ) -> Database:
        """Connect, brings the schema to its newest form, and start the writer. Raise ConfigError.

        Without `migrate` the schema must have that form, and nothing is changed.
        """
        # Alembic takes 0.1 s to import, and only this needs it
        from gateway.store.schema import bring_up_to_date, check_form

        if not migrate:
            await asyncio.to_thread(check_form, settings)
        engine = connect(settings.url, _READERS + 1)
        try:
            if migrate:
                await asyncio.to_thread(bring_up_to_date, engine, settings)
        except BaseException:
            engine.dispose()
            raise
        database = cls(settings, engine, on_commit)
        database._writer.start()
        return database

    async def close(self) -> None:
        """Commit the submitted writes and disconnects. Writes that an unreachable database does not take in time fail."""
        if self._open:
            self._open = False
            self._committer.stop(self._settings.read_wait_s)
            self._queue.put(None)
        await asyncio.to_thread(self._writer.join)
        self._readers.shutdown()
        self._engine.dispose()

    @property
    def healthy(self) -> bool:
        """True while writes are committed."""
        return self._open and self._writer.is_alive()

    @property
    def pending(self) -> int:
        """Return the writes that were submitted and are not committed."""
        return self._waiting

    @property
    def reachable(self) -> bool:
        """True if the database did its work at the last writes and reads; otherwise writes wait."""
        return self._committer.reachable and not self._unread

    def check(self) -> None:
        """Check that something new may begin. Raise Unavailable if a write would be refused now, or the disk is full."""
        self.check_write()
        if self._committer.full:
            raise Unavailable(
                "the disk of the database ([store] url) is full: free some space; requests in progress are recorded then",
                retry_after=10.0,
                code="store_full",
            )

    def check_write(self) -> None:
        """Raise Unavailable if a write would be refused now. What has begun may write to a full disk, too: it waits."""
        if not self.healthy:
            raise Unavailable(
                "the thread that writes to the database has ended: restart the gateway",
                retry_after=10.0,
                code="store_down",
            )
        if self._waiting >= self._settings.max_pending:
            raise Unavailable(
                "too many writes wait for the database ([store] max_pending)",
                retry_after=5.0,
                code="store_busy",
            )

    def submit(self, write: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Queue a write; the future is done once it is committed. Raise Unavailable when too many wait.

        The function runs in the writer's thread, and may run more than once (see commits.py): it must do nothing but write.
        """
        self.check_write()
        return self.put(write)

    def put(self, write: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Queue a write that `check_write` has let pass and that nothing may refuse, because memory has the change
        already."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting += 1
        self._queue.put((write, future))
        return future

    async def settled(self) -> None:
        """Wait until every write submitted so far is committed."""
        await self.submit(_nothing)

    def fenced(self, fence: int) -> Database:
        """Return the same database for the coordinator with this fence: once there is another, every write fails with Fenced."""
        return _Fenced(self, fence)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query that changes nothing, perhaps more than once. Raise Unavailable if the database stays away."""
        until = self._loop.time() + self._settings.read_wait_s
        for delay in delays():
            try:
                response = await self._read_in_thread(query)
            except (DataError, OverflowError) as error:
                raise refusal(error) from error
            except DBAPIError as error:
                self._unread = is_disconnected(error)
                if not (self._unread or is_retryable(error)):
                    raise
                if self._loop.time() + delay > until:
                    raise self._given_up(error) from error
            else:
                self._unread = False
                return response
            await asyncio.sleep(delay)
        raise AssertionError("the delays never end")

    async def _read_in_thread(self, query: Callable[[Connection], T]) -> T:
        """Run a query in a reader. Raise Unavailable if it is not done in time and the database does nothing else either."""
        reading = self._loop.run_in_executor(self._readers, self._read, query)
        while not (await asyncio.wait([reading], timeout=self._settings.read_wait_s))[0]:
            if not self.reachable:
                reading.add_done_callback(_forget)
                raise self._given_up(TimeoutError("the database did not respond"))
        return reading.result()

    def _given_up(self, error: Exception) -> Unavailable:
        wait_s = self._settings.read_wait_s
        log.error("a read was given up after %g s: %s", wait_s, getattr(error, "orig", error))
        message = f"step 'read': the database did not respond for {wait_s:g} s"
        return Unavailable(message, retry_after=5.0, code="store_down")

    def _read(self, query: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            begin_reading(connection)
            return query(connection)

    def _write_forever(self) -> None:
        """Run the writer's thread, until None is in the queue."""
        more = True
        group: list[_Item] = []
        while more:
            several, group = len(group) > 1, []
            item = self._queue.get()
            if several and item is not None:
                time.sleep(_GATHER_S)
            while item is not None:
                group.append(item)
                if len(group) == _MAX_GROUP or self._queue.empty():
                    break
                item = self._queue.get()
            more = item is not None
            if group:
                began = time.monotonic()
                outcomes = self._committer.commit([write for write, _ in group])
                self._on_commit(len(group), time.monotonic() - began)
                self._loop.call_soon_threadsafe(self._settle, group, outcomes)
        self._committer.close()

    def _settle(self, group: list[_Item], outcomes: list[Outcome]) -> None:
        self._waiting -= len(group)
        self._unread = False
        for (_, future), (result, error) in zip(group, outcomes, strict=True):
            if future.cancelled():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)


class _Fenced(Database):
    """The database behind a fence (`Database.fenced`). Opening and closing are left to the database itself."""

    def __init__(self, database: Database, fence: int) -> None:
        self._database = database
        self._fence = fence

    @property
    def healthy(self) -> bool:
        return self._database.healthy

    @property
    def reachable(self) -> bool:
        return self._database.reachable

    def check(self) -> None:
        self._database.check()

    def check_write(self) -> None:
        self._database.check_write()

    def put(self, write: Callable[[Connection], T]) -> asyncio.Future[T]:
        def fenced(connection: Connection) -> T:
            coordination.check(connection, self._fence)
            return write(connection)

        return self._database.put(fenced)

    async def read(self, query: Callable[[Connection], T]) -> T:
        return await self._database.read(query)


_Item = tuple[Write, asyncio.Future[Any]]


def _forget(reading: asyncio.Future[Any]) -> None:
    if not reading.cancelled():
        reading.exception()


def _nothing(_connection: Connection) -> None:
    return
