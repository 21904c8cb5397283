"""Statements about responses that clients may request again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, insert, literal, select, update

from gateway.store.models import ResponseRow

_TABLE = ResponseRow.__table__


@dataclass(frozen=True)
class StoredResponse:
    """A response with what it adds to the conversation; the fields are those of `ResponseRow`."""

    id: str
    episode_id: str
    model: str
    previous: str
    messages: list[dict[str, Any]]
    input: list[dict[str, Any]]
    answer: dict[str, Any]
    """The response in the API's own form."""
    created_at: float


_COLUMNS = [_TABLE.c[field.name] for field in fields(StoredResponse)]


def insert_response(connection: Connection, stored: StoredResponse) -> None:
    """Store a response, unless one of this id is there: a retry must get the same."""
    if connection.scalar(select(_TABLE.c.id).where(_TABLE.c.id == stored.id)) is None:
        connection.execute(insert(ResponseRow).values(vars(stored)))


def response(connection: Connection, response_id: str) -> StoredResponse | None:
    """Return a response that was not deleted."""
    where = (_TABLE.c.id == response_id, _TABLE.c.deleted_at.is_(None))
    row = connection.execute(select(*_COLUMNS).where(*where)).one_or_none()
    return StoredResponse(*row) if row else None


def conversation(connection: Connection, response_id: str) -> list[dict[str, Any]]:
    """Return the messages of a response and of all that it continues, oldest first; deleted ones are part of it."""
    depth = literal(0).label("depth")
    chain = select(_TABLE.c.id, _TABLE.c.previous, depth).where(_TABLE.c.id == response_id)
    walk = chain.cte("chain", recursive=True)
    before = select(_TABLE.c.id, _TABLE.c.previous, walk.c.depth + 1).join(
        walk, _TABLE.c.id == walk.c.previous
    )
    walk = walk.union_all(before)
    query = select(_TABLE.c.messages).join(walk, _TABLE.c.id == walk.c.id).order_by(walk.c.depth.desc())
    return [message for row in connection.execute(query) for message in row.messages]


def delete_response(connection: Connection, response_id: str, at: float) -> bool:
    """Hide a response. Return False if there is none."""
    where = (_TABLE.c.id == response_id, _TABLE.c.deleted_at.is_(None))
    return connection.execute(update(ResponseRow).where(*where).values(deleted_at=at)).rowcount > 0
