"""Alembic's entry: migrates over the connection it is given, or to the URL in HEADGATE_STORE_URL.

All migrations of a run are one transaction, and processes that start together do it one after the other. On PostgreSQL none waits
long for a table that a running process uses.
"""

from __future__ import annotations

import os
import sqlite3

from alembic import context
from sqlalchemy import Connection, create_engine, text

from gateway.store.connections import driver
from gateway.store.models import Base

_LOCK = 0x68656164_67617465
"""The name of the advisory lock: "headgate"."""


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        compare_type=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            connection.execute(text("SET LOCAL lock_timeout = '2s'"))
            connection.execute(text("SET LOCAL statement_timeout = '15min'"))
        elif not _in_transaction(connection):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        context.run_migrations()


def _in_transaction(connection: Connection) -> bool:
    """Return whether SQLite has a transaction open: Python's driver begins none for DDL."""
    raw = connection.connection.driver_connection
    return isinstance(raw, sqlite3.Connection) and raw.in_transaction


given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
else:
    url = os.environ.get("HEADGATE_STORE_URL", "sqlite:///runs/headgate.db")
    with create_engine(driver(url)).begin() as opened:
        _run(opened)
