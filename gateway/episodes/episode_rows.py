"""An episode's row in the store and its form in memory: one made of the other, or both of the request that opens it. Pure, but
for the random parts of ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from gateway.episodes.open_episode import OpenEpisode
from gateway.render.redaction import Redactor
from gateway.store import episodes as statements
from gateway.store.records import NewEpisode, UnfinishedEpisode
from headgate.errors import Conflict
from headgate.keys import key_hash
from headgate.types import EpisodeRequest, EpisodeSampling


def stored_episode(row: UnfinishedEpisode, call_rewards: dict[str, float], now: float) -> OpenEpisode:
    """Return the episode of a row of an earlier process; its deadlines begin at `now`."""
    return OpenEpisode(
        id=row["id"],
        task_id=row["task_id"],
        group_id=row["group_id"],
        mode=row["mode"],
        model=row["model"],
        opened_at=now,
        created_at=row["created_at"],
        last_used_at=now,
        posted=row["reward"],
        components=row["components"],
        call_rewards=call_rewards,
        agent=row["agent"],
        opening=statements.opener(row["key_hash"]),
        continued=row["calls"] > 1,
        version=row["version"],
        sampling=EpisodeSampling(**(row["sampling"] or {})),
        attempt=row["attempt"],
    )


def new_episode(row: NewEpisode, request: EpisodeRequest, now: float) -> OpenEpisode:
    """Return the episode that a request has opened."""
    return OpenEpisode(
        id=row["id"],
        task_id=request.task_id,
        group_id=row["group_id"],
        mode=request.mode,
        model=request.model,
        opened_at=now,
        created_at=row["created_at"],
        last_used_at=now,
        key_hash=row["key_hash"],
        agent=request.agent,
        opening=request.opening,
        version=row["version"],
        sampling=request.sampling,
    )


def new_row(request: EpisodeRequest, key: str, redactor: Redactor) -> NewEpisode:
    """Return the row of an episode that is being opened, without its version."""
    return {
        "id": f"ep-{secrets.token_hex(10)}",
        "key_hash": statements.opened_by(request.opening) if request.opening else key_hash(key),
        "task_id": request.task_id,
        "group_id": request.group_id or f"{request.task_id}-{secrets.token_hex(6)}",
        "mode": request.mode,
        "model": request.model,
        "details": redactor.json(dict(request.details)),
        "state": "open",
        "reason": "",
        "created_at": time.time(),
        "agent": request.agent,
        "notice": request.notice,
        "sampling": request.sampling.stored(),
    }


def check_same(row: Mapping[str, object], request: EpisodeRequest) -> None:
    """Raise Conflict unless the episode of a repeated request is the one that it would open."""
    requested = {name: getattr(request, name) for name in ("task_id", "group_id", "mode", "model", "agent")}
    fixed = {name: value for name, value in requested.items() if value is not None}
    for name, value in {**fixed, "sampling": request.sampling.stored()}.items():
        if row[name] != value:
            message = f"this Idempotency-Key opened an episode with another {name}: {row[name]!r}"
            raise Conflict(message, code="idempotency_key_used", param=name)
