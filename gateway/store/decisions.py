"""Statements about decisions on episodes and groups, and their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import Connection, Select, Table, func, insert, literal, select

from gateway.store.clock import NOW
from gateway.store.events import Event, insert_events
from gateway.store.models import DecisionRow
from gateway.store.records import DecisionRecord, TrainedGroup

_COLUMNS = DecisionRow.__table__.c
_INSERT = insert(cast(Table, DecisionRow.__table__)).values(at=NOW)
_TRAINED = DecisionRow.kind == literal("trained", literal_execute=True)
"""The condition of the index that serves it, word for word."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: about an episode, or (without one) about a whole group."""

    kind: str
    """admitted, refused, finished, rewarded, closed, late, dropped, aborted, moved, occupied, trained, skipped, masked; deleted
    (the only one that is kept of an episode that was deleted)"""
    group_id: str
    episode_id: str = ""
    reason: str = ""
    batch: int | None = None
    entry: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


def insert_decisions(connection: Connection, model: str, decisions: Sequence[Decision]) -> None:
    """Append decisions about a model's episodes, and report those who watch."""
    if not decisions:
        return
    rows = [
        {
            "model": model,
            "group_id": decision.group_id,
            "episode_id": decision.episode_id,
            "kind": decision.kind,
            "reason": decision.reason,
            "batch": decision.batch,
            "entry": decision.entry,
            "details": decision.details,
        }
        for decision in decisions
    ]
    connection.execute(_INSERT, rows)
    insert_events(connection, [_event(model, one) for one in decisions if one.kind != "deleted"])


def _event(model: str, decision: Decision) -> Event:
    subject = "episode" if decision.episode_id else "group"
    facts = {"reason": decision.reason or None, "batch": decision.batch, "entry": decision.entry}
    data = {name: value for name, value in facts.items() if value is not None} | decision.details
    return Event(f"{subject}.{decision.kind}", model, decision.episode_id, decision.group_id, data)


def of_episode(connection: Connection, episode_id: str) -> list[DecisionRecord]:
    """Return every decision about an episode and about the groups that had its group's name, in order."""
    own = select(*_COLUMNS).where(DecisionRow.episode_id == episode_id)
    rows = list(connection.execute(own).mappings())
    names = {row["group_id"] for row in rows}
    groups = select(*_COLUMNS).where(DecisionRow.group_id.in_(names), DecisionRow.episode_id == "")
    rows += connection.execute(groups).mappings()
    # Sorted in Python: with ORDER BY, SQLite would rather scan all decisions about groups.
    return [cast(DecisionRecord, dict(row)) for row in sorted(rows, key=lambda row: row["seq"])]


def trained(
    connection: Connection, model: str, first: int = 0, until: int | None = None
) -> list[TrainedGroup]:
    """Return the groups of the trained batches from `first` to before `until`, in order of training."""
    columns = DecisionRow.group_id, DecisionRow.batch, DecisionRow.details
    query = select(*columns).where(DecisionRow.model == model, _TRAINED, DecisionRow.batch >= first)
    if until is not None:
        query = query.where(DecisionRow.batch < until)
    rows = connection.execute(query.order_by(DecisionRow.batch, DecisionRow.entry)).mappings()
    return [cast(TrainedGroup, dict(row)) for row in rows]


def groups_of_batch(batch: int) -> Select[str, str]:
    """Return the query of the model and id of each group that was trained in a batch."""
    return select(DecisionRow.model, DecisionRow.group_id).where(_TRAINED, DecisionRow.batch == batch)


def batches(connection: Connection, model: str) -> list[dict[str, Any]]:
    """Return the trained batches, in order: batch, groups, trained_at (seconds since the epoch)."""
    query = (
        select(DecisionRow.batch, func.count().label("groups"), func.min(DecisionRow.at).label("trained_at"))
        .where(DecisionRow.model == model, _TRAINED)
        .group_by(DecisionRow.batch)
        .order_by(DecisionRow.batch)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def counts(connection: Connection, model: str, kinds: Sequence[str], newest: int) -> list[dict[str, Any]]:
    """Count each reason among the `newest` decisions of all models: kind, reason, count."""
    last = select(func.max(DecisionRow.seq)).scalar_subquery()
    query = (
        select(DecisionRow.kind, DecisionRow.reason, func.count().label("count"))
        .where(DecisionRow.seq > last - newest, DecisionRow.model == model, DecisionRow.kind.in_(kinds))
        .group_by(DecisionRow.kind, DecisionRow.reason)
        .order_by(func.count().desc(), DecisionRow.kind, DecisionRow.reason)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def ended_groups(connection: Connection, model: str, newest: int) -> dict[str, int]:
    """Count the groups that ended, by the reason for which they were dropped, among the `newest` decisions of all models.

    Groups that got a place in a batch have an empty reason.
    """
    last = select(func.max(DecisionRow.seq)).scalar_subquery()
    query = (
        select(DecisionRow.reason, func.count(DecisionRow.group_id.distinct()))
        .where(DecisionRow.seq > last - newest, DecisionRow.model == model, DecisionRow.episode_id == "")
        .where(DecisionRow.kind.in_(("occupied", "dropped")))
        .group_by(DecisionRow.reason)
    )
    return {row[0]: row[1] for row in connection.execute(query)}
