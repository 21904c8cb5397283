"""Statements about the coordinator: who it is, and that nobody who no longer is writes what only it may write.

All times are the database's, so that the clocks of the processes do not matter. A fence is given out once, ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.errors import Fenced
from gateway.store.models import CoordinatorRow

_NAME = "control"
_CHECKED = "headgate_fence"
"""Where a connection remembers the fence that this transaction has checked: its row is locked until the end."""
_CLOCKS = {
    "postgresql": text("SELECT EXTRACT(EPOCH FROM clock_timestamp())"),
    "sqlite": text("SELECT (julianday('now') - 2440587.5) * 86400.0"),
}


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Who decides, and how many seconds of its lease are left (negative: none)."""

    fence: int
    holder: str
    url: str
    left_s: float


def claim(connection: Connection, holder: str, url: str, lease_s: float, over: int | None) -> int | None:
    """Makes `holder` the coordinator, after the one with the fence `over`; answers its fence.

    `over` None: after whoever is. 0: if nobody ever was. The answer None: another one was faster, or the lease of `over` was
    renewed meanwhile.
    """
    connection.info.pop(_CHECKED, None)
    values = {"holder": holder, "url": url, "deadline": _now(connection) + lease_s}
    if not over and _create(connection, values):
        return 1
    row = connection.execute(select(CoordinatorRow.fence, CoordinatorRow.deadline).with_for_update()).first()
    if row is None:
        return None
    now = _now(connection)  # it may have waited for the row
    if over is not None and (row.fence != over or row.deadline > now):
        return None
    connection.execute(
        update(CoordinatorRow).values(fence=row.fence + 1, **values | {"deadline": now + lease_s})
    )
    return int(row.fence) + 1


def _create(connection: Connection, values: dict[str, Any]) -> bool:
    """The first coordinator's row, unless there is one: of several at the same moment one is the first."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    row = insert(CoordinatorRow).values(name=_NAME, fence=1, **values).on_conflict_do_nothing()
    return connection.execute(row).rowcount > 0


def renew(connection: Connection, fence: int, lease_s: float) -> None:
    """Lengthens the lease. Raises Fenced."""
    where = CoordinatorRow.fence == fence
    renewed = connection.execute(
        update(CoordinatorRow).where(where).values(deadline=_now(connection) + lease_s)
    )
    if not renewed.rowcount:
        raise _fenced(fence)


def resign(connection: Connection, fence: int) -> None:
    """Lets another process follow at once, if `fence` is still the coordinator's."""
    connection.execute(update(CoordinatorRow).where(CoordinatorRow.fence == fence).values(deadline=0.0))


def current(connection: Connection) -> Coordinator | None:
    """The coordinator, or the last one."""
    row = connection.execute(select(CoordinatorRow.__table__)).first()
    if row is None:
        return None
    return Coordinator(row.fence, row.holder, row.url, row.deadline - _now(connection))


def check(connection: Connection, fence: int) -> None:
    """Holds every successor off until this transaction has ended. Raises Fenced if there is one already."""
    if connection.info.get(_CHECKED) == fence:
        return
    query = select(CoordinatorRow.fence)
    newest = connection.scalar(query.with_for_update(read=True))
    if newest != fence:
        raise _fenced(fence)
    connection.info[_CHECKED] = fence


def begin(connection: Connection) -> None:
    """A new transaction: it has checked no fence yet."""
    connection.info.pop(_CHECKED, None)


def _now(connection: Connection) -> float:
    return float(connection.scalar(_CLOCKS[connection.dialect.name]) or 0.0)


def _fenced(fence: int) -> Fenced:
    return Fenced(
        f"another gateway process has become the coordinator (this one had the fence {fence})",
        retry_after=1.0,
        code="fenced",
    )
