"""INSERT with ON CONFLICT, which SQLAlchemy offers in its dialects alone; each is loaded where it is used."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection


def insert(connection: Connection, table: Any) -> Any:
    """An INSERT into `table` that can say what to do on a conflict, in the form of the connection's database."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)
