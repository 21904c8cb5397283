"""Connections to the two databases, and what their errors mean.

`postgresql://` is spoken by psycopg, which SQLAlchemy imports when it connects: errors and connections are recognized by
attributes here. A gateway that stops in the middle of a transaction (a paused machine) loses the transaction after
`_IDLE_S`, so that its locks do not block other processes. Only servers that accept writes are used.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, InterfaceError, OperationalError

from gateway.config.server import DATABASE_FORMS, DATABASES
from gateway.config.settings import ConfigError
from gateway.store.columns import from_json, to_json
from headgate.errors import Unprocessable

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import psycopg

_CONNECT_S = 5
_CACHE_KIB = 8_192
"""SQLite's page cache for each connection: keys are spread over its trees, and with the default it would read most pages
again."""
_CHECKPOINT_PAGES = 4_000
"""Written before SQLite copies them into its main file, each once however often it was written (a page has 4 KiB)."""
_WAL_BYTES = 64 * 2**20
"""The size to which SQLite's log shrinks after a large transaction, or readers that held it up."""
_IDLE_S = 10
_PATIENT = {
    "application_name": "headgate",
    "connect_timeout": _CONNECT_S,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "target_session_attrs": "read-write",
}
"""Connection parameters for libpq, where the URL does not set them."""
_DISCONNECTED = ("08", "53", "57P01", "57P02", "57P03", "57P05", "25P03", "58")
"""SQLSTATEs: no connection, no room, shut down, and errors of the server's disk."""
_RETRYABLE = ("40001", "40P01", "55P03", "57014")
"""SQLSTATEs of: not serializable, deadlock, lock not available, and a statement cancelled by a person or the server's time
limit.
"""
_DISK_FULL = "53100"
_SQLITE_BUSY = (5, 6)
_SQLITE_FULL = 13
_SQLITE_DISCONNECTED = (10, _SQLITE_FULL)
"""SQLite's codes: an error of the disk, and no room on it."""
_SQLITE_UNUSABLE = (3, 8, 11, 14, 23, 26)
"""SQLite's codes: no permission, read-only, damaged, cannot be opened, not authorized, and not a database."""
_UNUSABLE = ("28000", "28P01", "3D000", "42501")
"""SQLSTATEs: a wrong user or password, no such database, and no permission."""
_NO_ACCESS = ("authentication failed", "no pg_hba.conf entry", '" does not exist')
"""Words of libpq's messages for the same errors, which have no SQLSTATE where a connection is refused."""


def connect(url: str, connections: int) -> Engine:
    """Return an engine with at most `size` connections; none is opened yet."""
    where = driver(url)
    if where.get_backend_name() == "sqlite":
        return _sqlite(where)
    options = {name: value for name, value in _PATIENT.items() if name not in where.query}
    engine = create_engine(
        where, json_serializer=to_json, json_deserializer=from_json, connect_args=options,
        pool_pre_ping=True, pool_size=connections, max_overflow=0,
    )  # fmt: skip
    event.listen(engine, "connect", _configure_postgres)
    return engine


def begin_reading(connection: Connection) -> None:
    """Begin a read-only transaction on one snapshot."""
    if connection.dialect.name == "postgresql":
        connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    else:
        connection.exec_driver_sql("BEGIN")


def begin_writing(connection: Connection) -> None:
    """Begin a transaction.

    Python's driver begins one only at the first changed row: a savepoint before it would be a transaction of its own,
    committed when it is released. SQLite is locked immediately, because a transaction that reads first could not write
    after another one's commit.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def driver(url: str) -> URL:
    """Python's own SQLite, also where a configuration names a wrapper around it; and psycopg, however PostgreSQL is named.

    Raise ConfigError.
    """
    try:
        given = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"[store] url: it cannot be read; {DATABASE_FORMS}") from error
    kind = given.drivername.partition("+")[0]
    if kind not in DATABASES:
        raise ConfigError(f"[store] url: {kind}:// is not supported; {DATABASE_FORMS}")
    return given.set(drivername=DATABASES[kind])


def without_password(url: str) -> str:
    return make_url(url).render_as_string(hide_password=True)


def is_disconnected(error: BaseException) -> bool:
    """Return true if the error means that the database cannot be reached, or cannot work, for now."""
    if not isinstance(error, DBAPIError):
        return False
    original: Any = error.orig
    if hasattr(original, "sqlstate"):
        if original.sqlstate is None:  # libpq's own error: no connection, or a broken one
            return isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated
        return original.sqlstate.startswith(_DISCONNECTED)
    return error.connection_invalidated or _sqlite_code(error) in _SQLITE_DISCONNECTED


def is_full(error: BaseException) -> bool:
    """Return whether an error means that the database's disk is full."""
    original = getattr(error, "orig", None)
    return _sqlite_code(error) == _SQLITE_FULL or getattr(original, "sqlstate", None) == _DISK_FULL


def _sqlite_code(error: BaseException) -> int | None:
    """Return SQLite's primary code; None if the error is not SQLite's."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_retryable(error: BaseException) -> bool:
    """Return true if the same transaction may well succeed a moment later."""
    if not isinstance(error, DBAPIError):
        return False
    if (code := _sqlite_code(error)) is not None:
        return code in _SQLITE_BUSY
    return getattr(error.orig, "sqlstate", None) in _RETRYABLE


def is_unusable(error: BaseException) -> bool:
    """Return whether an error means that this is not a database, or that this process cannot use it: a retry is of no
    use."""
    if not isinstance(error, DBAPIError):
        return False
    if (code := _sqlite_code(error)) is not None:
        return code in _SQLITE_UNUSABLE
    original: Any = error.orig
    if hasattr(original, "sqlstate"):
        return original.sqlstate in _UNUSABLE or any(words in str(original) for words in _NO_ACCESS)
    return False


def refusal(error: Exception) -> Exception:
    """Return the error that a caller should see: a value that the database cannot hold is the caller's."""
    if isinstance(error, DataError):
        return Unprocessable(f"the database cannot hold a value: {error.orig}", code="value_not_stored")
    if isinstance(error, OverflowError):
        return Unprocessable(f"the database cannot hold a value: {error}", code="value_not_stored")
    return error


def is_broken(connection: Connection) -> bool:
    """Return true if a connection is of no use any more."""
    if connection.closed or connection.invalidated:
        return True
    raw = _libpq(connection)
    return raw is not None and (raw.closed or raw.broken)


def is_failed(connection: Connection) -> bool:
    """Return true if PostgreSQL takes no further statement in this transaction, because one of them failed."""
    raw = _libpq(connection)
    return raw is not None and raw.info.transaction_status.name == "INERROR"


def _libpq(connection: Connection) -> psycopg.Connection | None:
    """psycopg's connection; None with SQLite."""
    if connection.dialect.name != "postgresql":
        return None
    return cast("psycopg.Connection | None", connection.connection.dbapi_connection)


def delays() -> Iterator[float]:
    """Yield the seconds to wait before each further try."""
    longest = 0.05
    while True:
        yield longest * random.uniform(0.5, 1.0)
        longest = min(1.0, longest * 2)


def give_back(url: str) -> None:
    """Give the space of what was deleted back to the file system (SQLite: all of it, while no other process uses the database;
    PostgreSQL: what is at the ends of tables, and the rest to their next rows), and updates the planners' statistics.
    """
    engine = connect(url, 1)
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            statements = (
                ("VACUUM (ANALYZE)",)
                if engine.dialect.name == "postgresql"
                else ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA optimize")
            )
            for statement in statements:
                connection.exec_driver_sql(statement)
    finally:
        engine.dispose()


def shorten_log(url: str) -> None:
    """Empty SQLite's log, which keeps what transactions wrote. Do nothing for PostgreSQL, and if a reader is in the way."""
    engine = connect(url, 1)
    try:
        if engine.dialect.name == "sqlite":
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    except DBAPIError as error:
        log.info("the database's log is not shortened: %s", type(error).__name__)
    finally:
        engine.dispose()


def _sqlite(url: URL) -> Engine:
    if url.database not in (None, "", ":memory:"):
        folder = Path(str(url.database)).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"[store] url: the folder {folder} cannot be made: {error.strerror}; name one that can be written"
            raise ConfigError(message) from error
    engine = create_engine(url, json_serializer=to_json, json_deserializer=from_json)
    event.listen(engine, "connect", _configure_sqlite)
    return engine


def _configure_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA secure_delete=ON")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    cursor.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    cursor.execute(f"PRAGMA journal_size_limit={_WAL_BYTES}")
    cursor.close()


def _configure_postgres(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            f"SET synchronous_commit TO on;SET idle_in_transaction_session_timeout TO '{_IDLE_S}s'"
        )
    connection.commit()
