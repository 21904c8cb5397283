"""Statements about answers that clients may ask for again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, insert, literal, select, tuple_, update

from gateway.store.columns import contains
from gateway.store.models import AnswerRow, EpisodeRow

_TABLE = AnswerRow.__table__
_COLUMNS = [c for c in _TABLE.c if c.name not in ("agent", "asked_model", "labels")]
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of answers: one episode, or all of an agent's."""

    episode_id: str
    """Empty: the agent's."""
    agent: str

    @property
    def clause(self) -> ColumnElement[bool]:
        """The condition in SQL."""
        if self.episode_id:
            return _TABLE.c.episode_id == self.episode_id
        return _TABLE.c.agent == self.agent


def insert_answer(connection: Connection, values: dict[str, Any]) -> None:
    """Stores an answer, unless one of this id is there: a retry must get the same."""
    if connection.scalar(select(_TABLE.c.id).where(_TABLE.c.id == values["id"])) is None:
        connection.execute(insert(AnswerRow).values({**values, **_listed(values)}))


def answer(connection: Connection, answer_id: str, api: str) -> dict[str, Any] | None:
    """An answer that was not deleted."""
    where = (_TABLE.c.id == answer_id, _TABLE.c.api == api, _TABLE.c.deleted_at.is_(None))
    row = connection.execute(select(*_COLUMNS).where(*where)).mappings().first()
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
    """Hides an answer. Returns False if there is none."""
    where = (_TABLE.c.id == answer_id, _TABLE.c.deleted_at.is_(None))
    return connection.execute(update(AnswerRow).where(*where).values(deleted_at=at)).rowcount > 0


def set_metadata(connection: Connection, answer_id: str, metadata: dict[str, str]) -> dict[str, Any] | None:
    """Replaces an answer's metadata. Returns the answer, or None if there is none."""
    where = (_TABLE.c.id == answer_id, _TABLE.c.deleted_at.is_(None))
    found = connection.scalar(select(_TABLE.c.answer).where(*where))
    if found is None:
        return None
    changed: dict[str, Any] = {**found, "metadata": metadata}
    new = {"answer": changed, "labels": labels_of(metadata)}
    connection.execute(update(AnswerRow).where(*where).values(new))
    return changed


def list_answers(
    connection: Connection,
    api: str,
    owner: Owner,
    *,
    model: str | None,
    metadata: Mapping[str, str],
    order: Order,
    limit: int,
    after: str | None,
) -> list[dict[str, Any]]:
    """Answers as their clients got them; after the one of id `after`.

    `model`: the name by which the client asked for it. `metadata`: what each of them has, perhaps among other things.
    """
    columns = (_TABLE.c.created_at, _TABLE.c.id)
    query = select(_TABLE.c.answer).where(owner.clause, _TABLE.c.api == api, _TABLE.c.deleted_at.is_(None))
    if model is not None:
        query = query.where(_TABLE.c.asked_model == model)
    for pair in metadata.items():
        query = query.where(contains(_TABLE.c.labels, labels_of(dict([pair]))))
    if after is not None:
        last = select(_TABLE.c.created_at, _TABLE.c.id).where(_TABLE.c.id == after).subquery()
        bound = select(last.c.created_at, last.c.id).scalar_subquery()
        query = query.where(tuple_(*columns) > bound if order == "asc" else tuple_(*columns) < bound)
    query = query.order_by(*(c.asc() if order == "asc" else c.desc() for c in columns)).limit(limit)
    return list(connection.scalars(query))


def labels_of(metadata: Mapping[str, Any]) -> str:
    """Returns metadata as a text in which each pair can be found: each as JSON, which has no newlines, between newlines."""
    pairs = (json.dumps([key, value]) for key, value in metadata.items())
    return "".join(f"\n{pair}\n" for pair in pairs)


def fill_in(connection: Connection, limit: int) -> int:
    """Fills in the columns by which answers are listed, in up to `limit` answers of older builds; returns how many there were."""
    query = select(_TABLE.c.id, _TABLE.c.episode_id, _TABLE.c.answer).where(_TABLE.c.labels.is_(None))
    rows = connection.execute(query.order_by(_TABLE.c.id).limit(limit)).mappings().all()
    for row in rows:
        connection.execute(update(AnswerRow).where(_TABLE.c.id == row["id"]).values(_listed({**row})))
    return len(rows)


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns by which an answer is listed."""
    told = values["answer"]
    agent = select(EpisodeRow.agent).where(EpisodeRow.id == values["episode_id"]).scalar_subquery()
    labels = labels_of(told.get("metadata") or {})
    return {"agent": agent, "asked_model": told.get("model"), "labels": labels}
