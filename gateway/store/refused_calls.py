"""Statements about calls that were refused before anything was sampled: they are a part of their episode.

Bounded: a refusal like the newest one of its episode is counted with it, and beyond `MOST` the newest replaces the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

from sqlalchemy import Connection, func, insert, select, update

from gateway.store.columns import portions
from gateway.store.models import CallRow, EpisodeRow, RefusedCallRow
from gateway.store.records import RefusedCallRecord

MOST = 32
"""Rows of an episode."""
CONTEXT_FULL = "context_length_exceeded"
"""The code of calls whose prompt leaves no room for a reply in the model's context."""
_SAME = ("api", "model", "status", "code", "message")
_SHOWN = ("at", *_SAME, "times")


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call that was refused."""

    at: float
    """When the request came, in seconds since the epoch."""
    api: str
    model: str
    """The model that was to respond; empty if the request was refused before that was known."""
    status: int
    code: str
    message: str


def add(connection: Connection, episode_id: str, refused: RefusedCall) -> None:
    """Store a refused call of an episode."""
    own = RefusedCallRow.episode_id == episode_id
    # Other processes may add to the episode, too
    connection.scalar(select(EpisodeRow.id).where(EpisodeRow.id == episode_id).with_for_update())
    query = select(*RefusedCallRow.__table__.c).where(own).order_by(RefusedCallRow.index.desc()).limit(1)
    newest = connection.execute(query).mappings().first()
    values = asdict(refused)
    if newest is None:
        connection.execute(insert(RefusedCallRow).values(episode_id=episode_id, index=0, times=1, **values))
    elif newest["index"] + 1 == MOST or all(newest[name] == values[name] for name in _SAME):
        place = own, RefusedCallRow.index == newest["index"]
        changed = update(RefusedCallRow).where(*place)
        connection.execute(changed.values(times=newest["times"] + 1, **values))
    else:
        following = {"episode_id": episode_id, "index": newest["index"] + 1, "times": 1}
        connection.execute(insert(RefusedCallRow).values(**following, **values))


def of_episode(connection: Connection, episode_id: str) -> list[RefusedCallRecord]:
    """Return the refused calls of an episode, oldest first."""
    query = select(*(RefusedCallRow.__table__.c[name] for name in _SHOWN))
    query = query.where(RefusedCallRow.episode_id == episode_id).order_by(RefusedCallRow.index)
    return [cast(RefusedCallRecord, dict(row)) for row in connection.execute(query).mappings()]


def ended_full(connection: Connection, model: str, episode_ids: Sequence[str]) -> set[str]:
    """Return the episodes whose last call to their model was refused because the context was full."""
    full: dict[str, float] = {}
    served: dict[str, float] = {}
    for some in portions(episode_ids):
        refused = select(RefusedCallRow.episode_id, func.max(RefusedCallRow.at)).where(
            RefusedCallRow.episode_id.in_(some),
            RefusedCallRow.model == model,
            RefusedCallRow.code == CONTEXT_FULL,
        )
        rows = connection.execute(refused.group_by(RefusedCallRow.episode_id))
        full |= {row[0]: row[1] for row in rows}
    for some in portions([*full]):
        calls = select(CallRow.episode_id, func.max(CallRow.received_at)).where(
            CallRow.episode_id.in_(some), CallRow.model == model
        )
        rows = connection.execute(calls.group_by(CallRow.episode_id))
        served |= {row[0]: row[1] for row in rows}
    return {episode_id for episode_id, at in full.items() if at > served.get(episode_id, 0.0)}
