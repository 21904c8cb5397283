"""Statements that elect the coordinator, and that keep former coordinators from writing.

All times are the database's, so that the clocks of the processes do not matter. A fence is given out once, ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, Table, select, update

from gateway.store import upsert
from gateway.store.clock import NOW
from gateway.store.models import CoordinatorRow
from headgate.errors import Fenced

_NAME = "control"
_RESIGNED_S = 1e8
"""A lease that ended years ago: `resign` sets its deadline to the epoch."""
_CHECKED = "headgate_fence"
"""The key under which a connection remembers the fence that this transaction has checked: its row is locked until the
end."""
_TABLE = cast(Table, CoordinatorRow.__table__)


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The coordinator, and the seconds that are left of its lease (negative: none)."""

    fence: int
    holder: str
    url: str
    left_s: float

    @property
    def resigned(self) -> bool:
        """True if the holder has given its place up."""
        return self.left_s < -_RESIGNED_S


def claim(connection: Connection, holder: str, url: str, lease_s: float, over: int | None) -> int | None:
    """Make `holder` the coordinator, after the one with the fence `over`; return its fence.

    `over`: the fence of the coordinator to succeed; None: any; 0: there never was one. Return None if another was faster,
    or if the lease of `over` was renewed in the meantime.
    """
    connection.info.pop(_CHECKED, None)
    values = {"holder": holder, "url": url, "deadline": NOW + lease_s}
    if not over and _create(connection, values):
        return 1
    where = () if over is None else (_TABLE.c.fence == over, _TABLE.c.deadline <= NOW)
    taken = update(_TABLE).where(*where).values(fence=_TABLE.c.fence + 1, **values).returning(_TABLE.c.fence)
    return connection.scalar(taken)


def _create(connection: Connection, values: dict[str, Any]) -> bool:
    """Return the first coordinator's row, unless there is one: of several at the same moment one is the first."""
    row = upsert.insert(connection, _TABLE).values(name=_NAME, fence=1, **values).on_conflict_do_nothing()
    return connection.scalar(row.returning(_TABLE.c.fence)) is not None


def renew(connection: Connection, fence: int, lease_s: float) -> None:
    """Lengthen the lease. Raise Fenced."""
    renewed = update(_TABLE).where(_TABLE.c.fence == fence).values(deadline=NOW + lease_s)
    if not connection.execute(renewed).rowcount:
        raise _fenced(fence)


def resign(connection: Connection, fence: int) -> None:
    """Let another process become the coordinator immediately, if `fence` is still the coordinator's."""
    connection.execute(update(_TABLE).where(_TABLE.c.fence == fence).values(deadline=0.0))


def current(connection: Connection) -> Coordinator | None:
    """Return the coordinator, or the last one."""
    row = connection.execute(select(_TABLE, NOW.label("now"))).first()
    return None if row is None else Coordinator(row.fence, row.holder, row.url, row.deadline - row.now)


def check(connection: Connection, fence: int) -> None:
    """Hold every successor off until this transaction has ended. Raise Fenced if there is one already."""
    if connection.info.get(_CHECKED) == fence:
        return
    newest = connection.scalar(select(_TABLE.c.fence).with_for_update(read=True))
    if newest != fence:
        raise _fenced(fence)
    connection.info[_CHECKED] = fence


def begin(connection: Connection) -> None:
    """Forget the checked fence at the start of a transaction."""
    connection.info.pop(_CHECKED, None)


def _fenced(fence: int) -> Fenced:
    return Fenced(
        f"another gateway process has become the coordinator (this one had the fence {fence})",
        retry_after=1.0,
        code="fenced",
    )
