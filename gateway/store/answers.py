"""Statements about answers that clients may request again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, literal, select, update

from gateway.store.models import AnswerRow

_TABLE = AnswerRow.__table__


def insert_answer(connection: Connection, values: dict[str, Any]) -> None:
    """Store an answer, unless one of this id is there: a retry must get the same."""
    if connection.scalar(select(_TABLE.c.id).where(_TABLE.c.id == values["id"])) is None:
        connection.execute(insert(AnswerRow).values(values))


def answer(connection: Connection, answer_id: str) -> dict[str, Any] | None:
    """Return an answer that was not deleted."""
    where = (_TABLE.c.id == answer_id, _TABLE.c.deleted_at.is_(None))
    row = connection.execute(select(_TABLE).where(*where)).mappings().first()
    return dict(row) if row else None


def conversation(connection: Connection, answer_id: str) -> list[dict[str, Any]]:
    """Return the messages of an answer and of all that it continues, oldest first; deleted ones are part of it."""
    depth = literal(0).label("depth")
    chain = select(_TABLE.c.id, _TABLE.c.previous, depth).where(_TABLE.c.id == answer_id)
    walk = chain.cte("chain", recursive=True)
    before = select(_TABLE.c.id, _TABLE.c.previous, walk.c.depth + 1).join(
        walk, _TABLE.c.id == walk.c.previous
    )
    walk = walk.union_all(before)
    query = select(_TABLE.c.messages).join(walk, _TABLE.c.id == walk.c.id).order_by(walk.c.depth.desc())
    return [message for row in connection.execute(query) for message in row.messages]


def delete_answer(connection: Connection, answer_id: str, at: float) -> bool:
    """Hide an answer. Return False if there is none."""
    where = (_TABLE.c.id == answer_id, _TABLE.c.deleted_at.is_(None))
    return connection.execute(update(AnswerRow).where(*where).values(deleted_at=at)).rowcount > 0
