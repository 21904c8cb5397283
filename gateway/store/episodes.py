"""Statements about episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from gateway.store.models import EpisodeRow
from gateway.types import EpisodeMode

_TABLE = EpisodeRow.__table__
_COLUMNS = [column for column in _TABLE.c if column.name != "key_hash"]


def insert_episode(connection: Connection, values: dict[str, Any]) -> None:
    """Stores a new episode."""
    connection.execute(insert(EpisodeRow), values)


def set_reward(
    connection: Connection, episode_id: str, reward: float, components: dict[str, float] | None
) -> None:
    """Stores a reward that is not final."""
    connection.execute(
        update(EpisodeRow).where(EpisodeRow.id == episode_id).values(reward=reward, components=components)
    )


def begin_grading(connection: Connection, episode_id: str) -> None:
    """The episode's run is over, and its reward is being computed."""
    connection.execute(update(EpisodeRow).where(EpisodeRow.id == episode_id).values(state="grading"))


def close_episode(connection: Connection, episode_id: str, values: dict[str, Any]) -> None:
    """Closes an episode: state, reason, closed_at and, with a final reward, reward and components."""
    connection.execute(update(EpisodeRow).where(EpisodeRow.id == episode_id).values(**values))


def episode(connection: Connection, episode_id: str) -> dict[str, Any] | None:
    """One episode."""
    row = connection.execute(select(*_COLUMNS).where(EpisodeRow.id == episode_id)).mappings().first()
    return dict(row) if row else None


def open_by_key(connection: Connection, key_hash: str) -> dict[str, Any] | None:
    """The episode that a key opens."""
    row = connection.execute(select(*_COLUMNS).where(EpisodeRow.key_hash == key_hash)).mappings().first()
    return dict(row) if row else None


def unfinished(connection: Connection) -> list[dict[str, Any]]:
    """Every episode that is open or being graded."""
    rows = connection.execute(select(*_COLUMNS).where(EpisodeRow.state != "closed")).mappings()
    return [dict(row) for row in rows]


def list_episodes(
    connection: Connection,
    state: str | None = None,
    mode: EpisodeMode | None = None,
    group_id: str | None = None,
    task_id: str | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """The newest episodes."""
    query = select(*_COLUMNS).order_by(EpisodeRow.created_at.desc()).limit(limit)
    wanted = {"state": state, "mode": mode, "group_id": group_id, "task_id": task_id}
    for name, value in wanted.items():
        if value is not None:
            query = query.where(_TABLE.c[name] == value)
    return [dict(row) for row in connection.execute(query).mappings()]


def by_id(connection: Connection, episode_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Some episodes, in no order."""
    rows = connection.execute(select(*_COLUMNS).where(EpisodeRow.id.in_(episode_ids))).mappings()
    return [dict(row) for row in rows]


def rewarded(connection: Connection, model: str) -> list[dict[str, Any]]:
    """Every rewarded training episode of a model, in the order of opening: id, group_id, version."""
    query = (
        select(EpisodeRow.id, EpisodeRow.group_id, EpisodeRow.version)
        .where(EpisodeRow.model == model, EpisodeRow.mode == "train", EpisodeRow.reason == "rewarded")
        .order_by(EpisodeRow.created_at, EpisodeRow.id)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def count_by_state(connection: Connection) -> dict[str, int]:
    """How many episodes there are of each state, mode and reason."""
    query = select(EpisodeRow.mode, EpisodeRow.state, EpisodeRow.reason, func.count()).group_by(
        EpisodeRow.mode, EpisodeRow.state, EpisodeRow.reason
    )
    return {"/".join(filter(None, key)): count for *key, count in connection.execute(query)}
