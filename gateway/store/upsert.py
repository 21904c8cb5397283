"""INSERT with ON CONFLICT, which SQLAlchemy offers in its dialects alone."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


def insert(connection: Connection, table: Any) -> Any:
    """Return an INSERT into `table` that supports ON CONFLICT, in the form of the connection's database."""
    return _INSERTS[connection.dialect.name](table)
