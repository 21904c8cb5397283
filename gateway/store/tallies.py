"""Counts of episodes by model, mode, state and reason, kept so that no query scans all episodes.

Invariant: each transaction that stores, changes or deletes episodes updates the tallies. `recount` computes them again
after an older build, which does not maintain them, has written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select

from gateway.store import upsert
from gateway.store.models import EpisodeRow, TallyRow

KEY = ("model", "mode", "state", "reason")
_EPISODES = [EpisodeRow.__table__.c[name] for name in KEY]
_TALLIES = [TallyRow.__table__.c[name] for name in KEY]


def changed(
    connection: Connection, removed: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> None:
    """Update the counts for changed episodes: `removed` and `new` are their rows before and after, with the values of `KEY`
    at least."""
    by: Counter[tuple[str, ...]] = Counter()
    for rows, one in ((removed, -1), (new, 1)):
        for row in rows:
            by[tuple(row.get(name, "") for name in KEY)] += one
    added = [dict(zip(KEY, key, strict=True)) | {"count": n} for key, n in sorted(by.items()) if n]
    if not added:
        return
    tally = upsert.insert(connection, TallyRow)
    total = {"count": TallyRow.count + tally.excluded["count"]}
    connection.execute(tally.on_conflict_do_update(index_elements=list(KEY), set_=total), added)


def recount(connection: Connection) -> None:
    """Count every episode."""
    connection.execute(delete(TallyRow))
    counted = select(*_EPISODES, func.count()).group_by(*_EPISODES)
    connection.execute(insert(TallyRow).from_select([*KEY, "count"], counted))


def tallies(connection: Connection, models: Sequence[str] | None = None) -> Counter[tuple[str, str, str]]:
    """Return the number of episodes by (mode, state, reason); `models`: of these alone."""
    query = select(*_TALLIES, TallyRow.count).where(TallyRow.count > 0)
    if models is not None:
        query = query.where(TallyRow.model.in_(models))
    found: Counter[tuple[str, str, str]] = Counter()
    for row in connection.execute(query).mappings():
        found[row["mode"], row["state"], row["reason"]] += row["count"]
    return found
