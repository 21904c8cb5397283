"""Statements about the ledger's events, leases and versions of weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Connection, RowMapping, func, insert, select, update

from gateway.store.clock import NOW
from gateway.store.events import Event, insert_events
from gateway.store.models import LeaseRow, LedgerEventRow, VersionRow
from gateway.store.records import LeaseRecord, VersionRecord

_LEASE_COLUMNS = [LeaseRow.id.label("lease_id"), LeaseRow.batch, LeaseRow.fence, LeaseRow.consumer]


def insert_event(
    connection: Connection, model: str, event: dict[str, Any], commands: list[dict[str, Any]]
) -> None:
    """Append an event of the ledger, and the commands that followed from it."""
    values = {"model": model, "at": time.time(), "event": event, "commands": commands}
    connection.execute(insert(LedgerEventRow), values)


def events(connection: Connection, model: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Every event of a model's ledger, or the first ones, in order."""
    query = select(LedgerEventRow.event).where(LedgerEventRow.model == model).order_by(LedgerEventRow.seq)
    return list(connection.scalars(query.limit(limit)))


def newest_fence(connection: Connection, model: str) -> int:
    """Return the greatest fencing number ever given out for a model; 0 if none."""
    return connection.scalar(select(func.max(LeaseRow.fence)).where(LeaseRow.model == model)) or 0


def open_lease(connection: Connection, model: str) -> LeaseRecord | None:
    """Return the open lease of a model, with its remaining seconds: `left_s` (negative: it has expired)."""
    left = (LeaseRow.deadline - NOW).label("left_s")
    query = select(*LeaseRow.__table__.c, left).where(LeaseRow.model == model, LeaseRow.state == "held")
    row = connection.execute(query.order_by(LeaseRow.fence.desc()).limit(1)).mappings().first()
    return cast(LeaseRecord, dict(row)) if row else None


def lease(connection: Connection, model: str, lease_id: str) -> LeaseRecord | None:
    query = select(*LeaseRow.__table__.c).where(LeaseRow.model == model, LeaseRow.id == lease_id)
    row = connection.execute(query).mappings().first()
    return cast(LeaseRecord, dict(row)) if row else None


def insert_lease(connection: Connection, values: dict[str, Any], lease_s: float) -> None:
    """Store a lease that ends after this many seconds."""
    connection.execute(insert(LeaseRow).values(**values, created_at=NOW, deadline=NOW + lease_s))
    data = {name: values[name] for name in ("batch", "fence", "consumer")}
    insert_events(
        connection, [Event("batch.leased", values["model"], data={"lease_id": values["id"], **data})]
    )


def renew_lease(connection: Connection, model: str, fence: int, lease_s: float) -> None:
    """Let a lease end after this many seconds."""
    where = (LeaseRow.model == model, LeaseRow.fence == fence)
    connection.execute(update(LeaseRow).where(*where).values(deadline=NOW + lease_s))


def end_lease(
    connection: Connection, model: str, fence: int, state: str, checkpoint: str = "", reason: str = ""
) -> None:
    """End a lease: acked, nacked, expired, or superseded by another of the same consumer."""
    where = (LeaseRow.model == model, LeaseRow.fence == fence)
    values = {"state": state, "checkpoint": checkpoint, "reason": reason}
    ended = update(LeaseRow).where(*where).values(**values).returning(*_LEASE_COLUMNS)
    more = {name: value for name, value in values.items() if value and name != "state"}
    _insert_lease_events(connection, model, state, connection.execute(ended).mappings().all(), more)


def skip_leases(connection: Connection, model: str, until: int) -> None:
    """End the leases of the batches before `until`, which will never be trained."""
    where = (LeaseRow.model == model, LeaseRow.state == "held", LeaseRow.batch < until)
    ended = update(LeaseRow).where(*where).values(state="skipped").returning(*_LEASE_COLUMNS)
    _insert_lease_events(connection, model, "skipped", connection.execute(ended).mappings().all(), {})


def _insert_lease_events(
    connection: Connection, model: str, what: str, rows: Sequence[RowMapping], more: dict[str, Any]
) -> None:
    insert_events(connection, [Event(f"batch.{what}", model, data={**row, **more}) for row in rows])


def insert_version(connection: Connection, values: dict[str, Any]) -> None:
    """Store a published version."""
    connection.execute(insert(VersionRow), values | {"created_at": time.time(), "report": []})
    what = "published" if values["state"] == "updating" else values["state"]
    data = {"version": values["version"], "parent": values["parent"]}
    insert_events(connection, [Event(f"version.{what}", values["model"], data=data)])


def set_version(
    connection: Connection,
    model: str,
    version: int,
    state: str,
    report: list[dict[str, Any]],
    bad: str = "",
) -> None:
    """Store how a version's update ended; `bad`: why no engine may run it."""
    where = (VersionRow.model == model, VersionRow.version == version)
    connection.execute(update(VersionRow).where(*where).values(state=state, report=report, bad=bad))
    data = {"version": version, "report": report} | ({"bad": bad} if bad else {})
    insert_events(connection, [Event(f"version.{state}", model, data=data)])


def bad_versions(connection: Connection, model: str) -> dict[int, str]:
    """Return the versions that no engine may run, and why."""
    where = (VersionRow.model == model, VersionRow.bad != "")
    query = select(VersionRow.version, VersionRow.bad).where(*where).order_by(VersionRow.version)
    return {row.version: row.bad for row in connection.execute(query)}


def version(connection: Connection, model: str, number: int) -> VersionRecord | None:
    where = (VersionRow.model == model, VersionRow.version == number)
    row = connection.execute(select(*VersionRow.__table__.c).where(*where)).mappings().first()
    return cast(VersionRecord, dict(row)) if row else None


def newest_version(connection: Connection, model: str, state: str | None = None) -> VersionRecord | None:
    """Return the newest version, or the newest in a state."""
    query = select(*VersionRow.__table__.c).where(VersionRow.model == model)
    if state is not None:
        query = query.where(VersionRow.state == state)
    row = connection.execute(query.order_by(VersionRow.version.desc()).limit(1)).mappings().first()
    return cast(VersionRecord, dict(row)) if row else None


def parents(connection: Connection, model: str, state: str | None = None) -> dict[int, int | None]:
    """Return the parent of every version, or of every version in a state."""
    query = select(VersionRow.version, VersionRow.parent).where(VersionRow.model == model)
    if state is not None:
        query = query.where(VersionRow.state == state)
    return {row.version: row.parent for row in connection.execute(query)}
