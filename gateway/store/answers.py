"""Statements about answers that their clients may come back for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, insert, literal, select, tuple_, update

from gateway.store.models import AnswerRow, EpisodeRow

_TABLE = AnswerRow.__table__
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class Whose:
    """An episode's, or all of an agent's."""

    episode_id: str
    """Empty: the agent's."""
    agent: str

    @property
    def clause(self) -> ColumnElement[bool]:
        """As SQL has it."""
        if self.episode_id:
            return _TABLE.c.episode_id == self.episode_id
        return _TABLE.c.episode_id.in_(select(EpisodeRow.id).where(EpisodeRow.agent == self.agent))


def insert_answer(connection: Connection, values: dict[str, Any]) -> None:
    """Stores an answer. One that is there already stays as it is: a retry answers the same."""
    if connection.scalar(select(_TABLE.c.id).where(_TABLE.c.id == values["id"])) is None:
        connection.execute(insert(AnswerRow), values)


def answer(connection: Connection, answer_id: str, api: str) -> dict[str, Any] | None:
    """An answer that was not deleted."""
    where = (_TABLE.c.id == answer_id, _TABLE.c.api == api, _TABLE.c.deleted_at.is_(None))
    row = connection.execute(select(*_TABLE.c).where(*where)).mappings().first()
    return dict(row) if row else None


def conversation(connection: Connection, answer_id: str) -> list[dict[str, Any]]:
    """The messages of an answer and of all that it continues, oldest first; deleted ones are part of it."""
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
    """Hides an answer. Answers whether it was there."""
    where = (_TABLE.c.id == answer_id, _TABLE.c.deleted_at.is_(None))
    return connection.execute(update(AnswerRow).where(*where).values(deleted_at=at)).rowcount > 0


def set_metadata(connection: Connection, answer_id: str, metadata: dict[str, str]) -> dict[str, Any] | None:
    """Gives an answer other metadata, and answers it as it is now; None if it is not there."""
    where = (_TABLE.c.id == answer_id, _TABLE.c.deleted_at.is_(None))
    found = connection.scalar(select(_TABLE.c.answer).where(*where))
    if found is None:
        return None
    changed: dict[str, Any] = {**found, "metadata": metadata}
    connection.execute(update(AnswerRow).where(*where).values(answer=changed))
    return changed


def list_answers(
    connection: Connection,
    api: str,
    whose: Whose,
    *,
    model: str | None,
    metadata: Mapping[str, str],
    order: Order,
    limit: int,
    after: str | None,
) -> list[dict[str, Any]]:
    """Answers as their clients got them; after the one of id `after`.

    `model`: the name by which the client asked for it.
    """
    place = tuple_(_TABLE.c.created_at, _TABLE.c.id)
    query = select(_TABLE.c.answer).where(whose.clause, _TABLE.c.api == api, _TABLE.c.deleted_at.is_(None))
    if after is not None:
        last = select(_TABLE.c.created_at, _TABLE.c.id).where(_TABLE.c.id == after).subquery()
        bound = select(last.c.created_at, last.c.id).scalar_subquery()
        query = query.where(place > bound if order == "asc" else place < bound)
    ascending = order == "asc"
    query = query.order_by(*(c.asc() if ascending else c.desc() for c in (_TABLE.c.created_at, _TABLE.c.id)))
    found: list[dict[str, Any]] = []
    for row in connection.execute(query):
        has = row.answer.get("metadata") or {}
        matches = all(has.get(key) == value for key, value in metadata.items())
        if matches and model in (None, row.answer["model"]):
            found.append(row.answer)
            if len(found) == limit:
                break
    return found
