"""The database's clock, the only one that processes on several hosts have in common.

Times that one process writes and another compares come from this clock; a process's own clocks measure durations alone.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Float, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

RESOLUTION_S = 0.002
"""The resolution in seconds, which is that of SQLite's clock: moments that are closer are equal."""


class _Now(FunctionElement[float]):
    type = Float()
    inherit_cache = True


@compiles(_Now, "postgresql")
def _of_postgresql(_element: _Now, _compiler: Any, **_options: Any) -> str:
    """Compile to the statement's time: `now()` would be the transaction's begin, perhaps before it waited for a lock."""
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


@compiles(_Now, "sqlite")
def _of_sqlite(_element: _Now, _compiler: Any, **_options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


NOW = _Now()
"""An SQL expression: seconds since the epoch."""


def now(connection: Connection) -> float:
    """Read the database's clock: seconds since the epoch."""
    return float(connection.execute(select(NOW)).scalar_one())
