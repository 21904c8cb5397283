"""Statements about decisions: what was decided about episodes and groups, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, insert

from gateway.store.models import DecisionRow


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: about an episode, or (without one) about a whole group."""

    kind: str
    """admitted, refused, finished, rewarded, dropped, aborted, moved, occupied, trained, skipped, masked"""
    group_id: str
    episode_id: str = ""
    reason: str = ""
    buffer: int | None = None
    entry: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


def insert_decisions(connection: Connection, model: str, decisions: Sequence[Decision]) -> None:
    """Appends decisions about a model's episodes."""
    if not decisions:
        return
    at = time.time()
    rows = [
        {
            "model": model,
            "at": at,
            "group_id": decision.group_id,
            "episode_id": decision.episode_id,
            "kind": decision.kind,
            "reason": decision.reason,
            "buffer": decision.buffer,
            "entry": decision.entry,
            "details": decision.details,
        }
        for decision in decisions
    ]
    connection.execute(insert(DecisionRow), rows)
