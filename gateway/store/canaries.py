"""Statements about trials of versions, and about the ended conversations by which they are decided."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, func, insert, select, update

from gateway.store.columns import portions
from gateway.store.events import Event, insert_events
from gateway.store.models import CallRow, CanaryRow, EpisodeRow, RefusedCallRow
from gateway.store.records import CanaryRecord

_C = CanaryRow.__table__.c


@dataclass(slots=True)
class EndedConversation:
    """What a conversation was like, as far as a trial compares it."""

    episode_id: str
    agent: str
    created_at: float
    closed_at: float
    reward: float | None
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    faulty: bool = False
    refused: bool = False


def begin(connection: Connection, values: CanaryRecord) -> None:
    """Store a trial that begins."""
    connection.execute(insert(CanaryRow), dict(values))
    data = {name: values[name] for name in ("version", "live", "share")}
    insert_events(connection, [Event("canary.begun", values["model"], data=data)])


def hold(connection: Connection, model: str, version: int, *, held: bool) -> None:
    """Store whether a person decides about a trial."""
    where = (CanaryRow.model == model, CanaryRow.version == version)
    connection.execute(update(CanaryRow).where(*where).values(held=held))
    what = "canary.held" if held else "canary.resumed"
    insert_events(connection, [Event(what, model, data={"version": version})])


def end(
    connection: Connection, model: str, version: int, outcome: str, why: str, figures: dict[str, Any]
) -> None:
    """Store how a trial ended, with the figures of both arms."""
    where = (CanaryRow.model == model, CanaryRow.version == version)
    values = {"outcome": outcome, "why": why, "figures": figures, "ended_at": time.time()}
    connection.execute(update(CanaryRow).where(*where).values(**values))
    data = {"version": version, "why": why, "figures": figures}
    insert_events(connection, [Event(f"canary.{outcome}", model, data=data)])


def canary(connection: Connection, model: str, version: int) -> CanaryRecord | None:
    """Return the trial of a version, if it had one."""
    query = select(*_C).where(CanaryRow.model == model, CanaryRow.version == version)
    row = connection.execute(query).mappings().first()
    return cast(CanaryRecord, dict(row)) if row else None


def newest(connection: Connection, model: str, limit: int) -> list[CanaryRecord]:
    """Return the newest trials of a model, the newest first."""
    query = select(*_C).where(CanaryRow.model == model).order_by(CanaryRow.version.desc()).limit(limit)
    return [cast(CanaryRecord, dict(row)) for row in connection.execute(query).mappings()]


def live_rewards(connection: Connection, model: str, agents: Collection[str], limit: int) -> list[float]:
    """Return the newest rewards of the agents' conversations, the newest first."""
    where = (
        EpisodeRow.model == model,
        EpisodeRow.agent.in_(agents),
        EpisodeRow.reward.is_not(None),
        EpisodeRow.closed_at.is_not(None),
    )
    query = select(EpisodeRow.reward).where(*where).order_by(EpisodeRow.closed_at.desc(), EpisodeRow.id)
    return [float(reward) for reward in connection.scalars(query.limit(limit)) if reward is not None]


def ended_conversations(
    connection: Connection, model: str, agents: Collection[str], opened_from: float, closed_from: float
) -> list[EndedConversation]:
    """Return the agents' conversations that were opened and closed since these times, in the order of their ends."""
    where = (
        EpisodeRow.model == model,
        EpisodeRow.agent.in_(agents),
        EpisodeRow.created_at >= opened_from,
        EpisodeRow.closed_at >= closed_from,
    )
    columns = EpisodeRow.id, EpisodeRow.agent, EpisodeRow.created_at, EpisodeRow.closed_at, EpisodeRow.reward
    rows = connection.execute(select(*columns).where(*where).order_by(EpisodeRow.closed_at, EpisodeRow.id))
    found = {
        id_: EndedConversation(id_, agent, created_at, closed_at or 0.0, reward)
        for id_, agent, created_at, closed_at, reward in rows
    }
    for some in portions(list(found)):
        _add_calls(connection, model, found, some)
    return list(found.values())


def _add_calls(
    connection: Connection, model: str, found: dict[str, EndedConversation], ids: Collection[str]
) -> None:
    sums = (
        CallRow.episode_id,
        func.count(),
        func.sum(CallRow.completion_tokens),
        func.sum(CallRow.seconds),
        func.count(CallRow.tool_faults),
    )
    calls = select(*sums).where(CallRow.episode_id.in_(ids), CallRow.model == model)
    for episode_id, count, tokens, seconds, faulty in connection.execute(calls.group_by(CallRow.episode_id)):
        one = found[episode_id]
        one.calls, one.tokens, one.seconds, one.faulty = count, int(tokens), float(seconds), faulty > 0
    refused = select(RefusedCallRow.episode_id).where(RefusedCallRow.episode_id.in_(ids)).distinct()
    for episode_id in connection.scalars(refused):
        found[episode_id].refused = True
