"""Databases with this build's empty tables, made once and copied, so that no test but those of the migrations waits for them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from gateway.sections import StoreSettings
from gateway.store.connections import connect
from gateway.store.schema import bring_up_to_date
from tests.harness.servers import PostgresServer


@cache
def _empty_sqlite() -> bytes:
    """A file of SQLite's with empty tables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        _make_tables(f"sqlite:///{path}")
        return path.read_bytes()


def sqlite_store(path: Path) -> str:
    """The URL of a new database in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_empty_sqlite())
    return f"sqlite:///{path}"


@cache
def _empty_postgres(server: PostgresServer) -> str:
    """The name of a database with empty tables, to which nobody is connected."""
    name = server.new_database()
    _make_tables(server.url(name))
    return name


def postgres_store(server: PostgresServer) -> str:
    """The URL of a new database on a server."""
    return server.url(server.new_database(like=_empty_postgres(server)))


def _make_tables(url: str) -> None:
    engine = connect(url, 1)
    bring_up_to_date(engine, StoreSettings(url=url))
    engine.dispose()
