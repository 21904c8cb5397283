"""Statements about how long calls were, newest episodes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from sqlalchemy import Connection, select

from gateway.store.columns import portions
from gateway.store.models import CallRow, EpisodeRow
from gateway.store.records import FinishedCall


def newest_episodes(connection: Connection, model: str, limit: int) -> list[str]:
    """Return the ids of the episodes of a trained model that were opened last, the newest first."""
    query = select(EpisodeRow.id).where(EpisodeRow.model == model)
    query = query.order_by(EpisodeRow.created_at.desc(), EpisodeRow.id.desc()).limit(limit)
    return list(connection.scalars(query))


def finished_calls(connection: Connection, model: str, episode_ids: Sequence[str]) -> list[FinishedCall]:
    """Return one model's finished calls in some episodes, oldest first, with their tasks and groups."""
    columns = (
        *(CallRow.id, CallRow.episode_id, CallRow.node, CallRow.used, CallRow.received_at),
        *(CallRow.prompt_tokens, CallRow.completion_tokens, EpisodeRow.task_id, EpisodeRow.group_id),
    )
    found: list[FinishedCall] = []
    for some in portions(episode_ids):
        query = (
            select(*columns)
            .join(EpisodeRow, EpisodeRow.id == CallRow.episode_id)
            .where(CallRow.episode_id.in_(some), CallRow.model == model)
            .where(CallRow.node >= 0, CallRow.finish_reason != "abandoned")
        )
        found += [cast(FinishedCall, dict(row)) for row in connection.execute(query).mappings()]
    return sorted(found, key=lambda call: (call["received_at"], call["node"], call["id"]))
