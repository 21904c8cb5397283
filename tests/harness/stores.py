"""Databases with this build's empty tables, made once and copied, so that no test but those of the migrations waits for them."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

from gateway.config import StoreSettings
from gateway.store.connections import connect
from gateway.store.schema import bring_up_to_date
from tests.harness.servers import PostgresServer


@cache
def _empty_sqlite() -> bytes:
    """Return a file of SQLite's with empty tables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        _migrate(f"sqlite:///{path}")
        return path.read_bytes()


def sqlite_store(path: Path) -> str:
    """Return the URL of a new database in a file."""
    path.write_bytes(_empty_sqlite())
    return f"sqlite:///{path}"


def make_tables(url: str) -> None:
    """Make the tables that a gateway would make at its start, if it is about to make a file of SQLite's."""
    path = path_of(url)
    if url.startswith("sqlite:") and path.parent.is_dir() and not path.exists():
        sqlite_store(path)


def crashed(url: str, target: Path) -> str:
    """Return the URL of a copy of SQLite's database as a crash would leave it now: what is committed, and no more."""
    with closing(sqlite3.connect(path_of(url))) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
    return f"sqlite:///{target}"


def path_of(url: str) -> Path:
    """Return the file of a database of SQLite's."""
    return Path(url.removeprefix("sqlite:///"))


@cache
def _empty_postgres(server: PostgresServer) -> str:
    """Return the name of a database with empty tables, to which no process is connected."""
    name = server.new_database()
    _migrate(server.url(name))
    return name


def postgres_store(server: PostgresServer) -> str:
    """Return the URL of a new database on a server."""
    return server.url(server.new_database(like=_empty_postgres(server)))


def _migrate(url: str) -> None:
    engine = connect(url, 1)
    bring_up_to_date(engine, StoreSettings(url=url))
    engine.dispose()
