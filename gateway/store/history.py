"""Statements about what happened to machines and versions: the states of engines and nodes over time, and the versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from sqlalchemy import Connection, and_, func, literal, or_, select

from gateway.store.columns import begins_with
from gateway.store.events import Event
from gateway.store.models import CallRow, EventRow, VersionRow
from gateway.store.records import VersionRecord

_E = EventRow.__table__.c
_NOTHING = literal("", literal_execute=True)
_OF_MACHINES = and_(_E.episode_id == _NOTHING, _E.group_id == _NOTHING)
"""The condition of the index that serves it, word for word."""


def machine_events(
    connection: Connection, subjects: Sequence[str], models: Sequence[str] | None = None
) -> list[Event]:
    """Return the stored events of some subjects (`engine`, `node`, `version`), in order; `models`: about these alone."""
    query = select(*_E).where(_OF_MACHINES, or_(*(begins_with(_E.kind, f"{name}.") for name in subjects)))
    if models is not None:
        query = query.where(_E.model.in_(models))
    rows = connection.execute(query.order_by(_E.id))
    return [Event(row.kind, row.model, "", "", row.data, row.id, row.at) for row in rows]


def versions(connection: Connection, model: str) -> list[VersionRecord]:
    """Return the versions of a model, the oldest first."""
    query = select(*VersionRow.__table__.c).where(VersionRow.model == model).order_by(VersionRow.version)
    return [cast(VersionRecord, dict(row)) for row in connection.execute(query).mappings()]


def faulty_calls(connection: Connection, model: str) -> int:
    """Return the number of a model's recorded replies whose tool calls were faulty."""
    where = (CallRow.tool_faults.is_not(None), CallRow.model == model)
    return connection.scalar(select(func.count()).select_from(CallRow).where(*where)) or 0
