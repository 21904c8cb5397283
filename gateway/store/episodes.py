"""Statements about episodes.

An episode that an agent's call opened has no key. Its `key_hash` is then no hash but names the call that opened it:
`call:`, the name of the request and random characters. So a retry finds the episode after a restart too, and no key has
that hash.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, func, insert, literal, select, update

from gateway.store import tallies
from gateway.store.clock import NOW
from gateway.store.columns import portions
from gateway.store.events import Event, insert_events
from gateway.store.models import CallRow, EpisodeRow
from gateway.store.records import EpisodeRecord, NewEpisode, UnfinishedEpisode

_TABLE = EpisodeRow.__table__
COLUMNS: list[ColumnElement[Any]] = [column for column in _TABLE.c if column.name != "key_hash"]
_OPENED_BY = "call:"
UNFINISHED = EpisodeRow.state != literal("closed", literal_execute=True)
"""The condition of the index that serves it, word for word: a planner that knows only how many rows a state has on average
would read them all.
"""


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A reply that was recorded, and the conversation that ends with it."""

    episode_id: str
    call_id: str
    digest: bytes


def opened_by(request: str) -> str:
    """Return the `key_hash` of an episode that the request of this name (32 characters) opened."""
    return f"{_OPENED_BY}{request}:{secrets.token_hex(13)}"


def opener(key_hash: str) -> str:
    """Return the name of the request that opened an episode; empty if it has a key."""
    return key_hash.split(":")[1] if key_hash.startswith(_OPENED_BY) else ""


def insert_episode(connection: Connection, values: NewEpisode) -> None:
    """Store a new episode."""
    row = dict(values)
    connection.execute(insert(EpisodeRow), row)
    tallies.changed(connection, [], [row])
    data: dict[str, Any] = {
        "task_id": values["task_id"],
        "mode": values["mode"],
        "version": values["version"],
    }
    if values.get("agent"):
        data["agent"] = values["agent"]
    _insert_event(connection, "opened", values, data)


def set_reward(
    connection: Connection, episode_id: str, reward: float, components: dict[str, float] | None
) -> None:
    """Store a reward that is not final."""
    connection.execute(
        update(EpisodeRow).where(EpisodeRow.id == episode_id).values(reward=reward, components=components)
    )


def begin_grading(connection: Connection, episode_id: str) -> None:
    """Mark the end of an episode's run: its reward is being computed."""
    if (row := _end(connection, episode_id, {"state": "grading"})) is not None:
        _insert_event(connection, "grading", row, {})


def leave_training(connection: Connection, episode_id: str, notice: str) -> None:
    """Make an open training episode an evaluation; `notice`: why."""
    before = connection.execute(select(*COLUMNS).where(EpisodeRow.id == episode_id)).mappings().first()
    if before is None or before["state"] != "open":
        return
    values = {"mode": "eval", "notice": notice}
    connection.execute(update(EpisodeRow).where(EpisodeRow.id == episode_id).values(**values))
    tallies.changed(connection, [dict(before)], [{**before, **values}])


def wait_for_place(connection: Connection, episode_id: str, reason: str) -> None:
    """Change the reason of a closed episode; when it was closed stays."""
    _end(connection, episode_id, {"reason": reason})


def change_group(connection: Connection, episode_id: str, group_id: str) -> None:
    """Put a closed episode into another group."""
    connection.execute(update(EpisodeRow).where(EpisodeRow.id == episode_id).values(group_id=group_id))


def closed_since(connection: Connection, since: float, reason: str) -> list[str]:
    """Return the episodes that were closed for a reason since a moment, the first first."""
    query = select(EpisodeRow.id).where(EpisodeRow.closed_at >= since, EpisodeRow.reason == reason)
    return [*connection.scalars(query.order_by(EpisodeRow.closed_at))]


def close_episode(connection: Connection, episode_id: str, values: dict[str, Any]) -> None:
    """Close an episode now: state, reason and, with a final reward, reward and components."""
    if (row := _end(connection, episode_id, {**values, "closed_at": NOW})) is not None:
        data = {name: row[name] for name in ("task_id", "mode", "version", "reason", "reward")}
        if row["components"]:
            data["components"] = row["components"]
        _insert_event(connection, "closed", row, data)


def _insert_event(connection: Connection, what: str, row: Mapping[str, Any], data: dict[str, Any]) -> None:
    event = Event(f"episode.{what}", row["model"], row["id"], row["group_id"], data)
    insert_events(connection, [event])


def _end(connection: Connection, episode_id: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """End an open episode, in which no conversation can go on from now on. Return its row; None if there is none."""
    before = connection.execute(select(*COLUMNS).where(EpisodeRow.id == episode_id)).mappings().first()
    if before is None:
        return None
    connection.execute(update(EpisodeRow).where(EpisodeRow.id == episode_id).values(**values))
    row = {**before, **values}
    tallies.changed(connection, [dict(before)], [row])
    if before["agent"]:
        where = (CallRow.episode_id == episode_id, CallRow.open_to.is_not(None))
        connection.execute(update(CallRow).where(*where).values(open_to=None))
    return row


def episode(connection: Connection, episode_id: str) -> EpisodeRecord | None:
    row = connection.execute(select(*COLUMNS).where(EpisodeRow.id == episode_id)).mappings().first()
    return cast(EpisodeRecord, dict(row)) if row else None


def open_by_key(connection: Connection, key_hash: str) -> EpisodeRecord | None:
    row = connection.execute(select(*COLUMNS).where(EpisodeRow.key_hash == key_hash)).mappings().first()
    return cast(EpisodeRecord, dict(row)) if row else None


def unfinished(connection: Connection) -> list[UnfinishedEpisode]:
    """Return every episode that is open or being graded, with `key_hash` and the number of its `calls`."""
    calls = select(func.count()).where(CallRow.episode_id == EpisodeRow.id).scalar_subquery()
    query = select(*_TABLE.c, calls.label("calls")).where(UNFINISHED)
    return [cast(UnfinishedEpisode, dict(row)) for row in connection.execute(query).mappings()]


def replies(connection: Connection, agent: str, digests: Sequence[bytes]) -> list[RecordedReply]:
    """Return the replies in an agent's open episodes at which one of some conversations ends."""
    query = select(CallRow.episode_id, CallRow.id, CallRow.digest).where(CallRow.open_to == agent)
    found: list[RecordedReply] = []
    for some in portions(digests):
        rows = connection.execute(query.where(CallRow.digest.in_(some)))
        found.extend(RecordedReply(*row) for row in rows)
    return found


def has_calls(connection: Connection, episode_id: str) -> bool:
    """Return true if anything was recorded in an episode."""
    return connection.scalar(select(CallRow.id).where(CallRow.episode_id == episode_id).limit(1)) is not None


def last_group(connection: Connection, prefix: str, model: str) -> str | None:
    """Return the last of a model's groups, in order, whose names are `prefix` and digits."""
    query = (
        select(EpisodeRow.group_id)
        .where(EpisodeRow.group_id >= prefix, EpisodeRow.group_id < prefix + ":", EpisodeRow.model == model)
        .order_by(EpisodeRow.group_id.desc())
        .limit(1)
    )
    return connection.scalar(query)


def by_id(connection: Connection, episode_ids: Sequence[str]) -> list[EpisodeRecord]:
    """Return some episodes, in no order."""
    found: list[EpisodeRecord] = []
    for some in portions(episode_ids):
        rows = connection.execute(select(*COLUMNS).where(EpisodeRow.id.in_(some))).mappings()
        found.extend(cast(EpisodeRecord, dict(row)) for row in rows)
    return found


def stored(connection: Connection, episode_ids: Sequence[str]) -> set[str]:
    """Return the ids among these that are stored."""
    return {
        found
        for some in portions(episode_ids)
        for found in connection.scalars(select(EpisodeRow.id).where(EpisodeRow.id.in_(some)))
    }


def rewarded(connection: Connection, model: str) -> list[tuple[str, str, int]]:
    """Return id, group and version of every rewarded training episode of a model, in the order of opening."""
    query = (
        select(EpisodeRow.id, EpisodeRow.group_id, EpisodeRow.version)
        .where(EpisodeRow.model == model, EpisodeRow.mode == "train", EpisodeRow.reason == "rewarded")
        .order_by(EpisodeRow.created_at, EpisodeRow.id)
    )
    return [row._tuple() for row in connection.execute(query)]


def ended(connection: Connection, model: str) -> dict[str, int]:
    """Return the number of a model's closed training episodes by reason, without those that were deleted."""
    counts = tallies.tallies(connection, [model])
    return {reason: n for (mode, state, reason), n in counts.items() if (mode, state) == ("train", "closed")}


def count_by_state(connection: Connection, models: Sequence[str] | None = None) -> dict[str, int]:
    """Count episodes by state, mode and reason; `models`: of these alone."""
    counts = tallies.tallies(connection, models)
    return {"/".join(filter(None, key)): count for key, count in sorted(counts.items())}
