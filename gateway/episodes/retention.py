"""Deletes old episodes, and old events: by the coordinator from time to time, by `gateway prune`, or one on request.

The store decides which may be deleted (gateway/store/retention.py); this module decides when and how fast. Invariant: between two
transactions as much time passes as the last one took, so at least half of the writer's time is left to calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from gateway.config import RetentionSettings
from gateway.config.settings import ConfigError, Settings
from gateway.store import clock, events, retention
from gateway.store import episodes as statements
from gateway.store.connections import give_back
from gateway.store.database import Database
from gateway.store.retention import Ages, Place, Swept
from headgate.errors import Conflict, NotFound

log = logging.getLogger(__name__)

_NEEDED = {
    "group": "its group is not over, so it may still be trained",
    "checkpoint": "the batch that was trained on it may be in no checkpoint yet, so it may have to be trained again",
    "responses": "a response of another episode continues one of its responses",
    "unknown": "it is from before decisions were kept, so it is unknown whether its group is over",
}
_FINAL = ("group", "checkpoint")
"""Reasons that `force` does not override."""


def ages(settings: RetentionSettings, now: float) -> Ages:
    """Return the ages that these settings mean at a moment (seconds since the epoch)."""
    every = settings.keep_days
    untrained = every if settings.keep_untrained_days is None else settings.keep_untrained_days
    evals = every if settings.keep_eval_days is None else settings.keep_eval_days
    return Ages(_ago(every, now), _ago(untrained, now), _ago(evals, now))


def _ago(days: float | None, now: float) -> float | None:
    return None if days is None else now - days * 86_400


async def prune(
    database: Database, old: Ages, *, dry: bool = False, report: Callable[[Swept], None] = lambda _swept: None
) -> Swept:
    """Delete what is too old; `dry` only reports it. `report` is called after every transaction, with the sum."""
    total, place = Swept(), None
    while True:
        began, here = time.monotonic(), place

        def step(connection: Connection, after: Place | None = here) -> tuple[Swept, Place | None]:
            return retention.sweep(connection, old, after, dry=dry)

        swept, place = await (database.read(step) if dry else database.submit(step))
        total.add(swept)
        report(total)
        if place is None:
            break
        await asyncio.sleep(0.0 if dry else time.monotonic() - began)
    if not dry and (before := old.untrained) is not None:
        forgotten = 1
        while forgotten:
            forgotten = await database.submit(lambda c: retention.forget(c, before))
    return total


async def tend(database: Database, settings: RetentionSettings) -> None:
    """Delete old episodes; the coordinator does it from time to time."""
    swept = await prune(database, ages(settings, await database.read(clock.now)))
    if deleted := swept.deleted.total():
        log.info("%d old episodes with %d calls are deleted ([retention])", deleted, swept.calls)


async def forget_events(database: Database, keep: int) -> None:
    """Delete all but the newest events; the coordinator does it from time to time."""
    while (await database.read(events.extent)).size > keep:
        began = time.monotonic()
        await database.submit(lambda c: events.forget(c, keep))
        await asyncio.sleep(time.monotonic() - began)


async def prune_store(
    settings: Settings,
    days: float | None,
    *,
    dry: bool,
    vacuum: bool,
    report: Callable[[Swept], None],
) -> Swept:
    """Return the same without a running gateway or next to one. `days` overrides [retention]. Raise ConfigError."""
    given = settings.retention if days is None else RetentionSettings.model_construct(keep_days=days)
    if ages(given, 0.0).newest is None:
        raise ConfigError("no age is given: set --older-than or [retention] keep_days")
    from gateway.store.schema import (
        check_form,  # Alembic takes 0.1 s to import, and a gateway never asks this
    )

    await asyncio.to_thread(check_form, settings.store)
    database = await Database.open(settings.store)
    try:
        swept = await prune(database, ages(given, await database.read(clock.now)), dry=dry, report=report)
    finally:
        await database.close()
    if vacuum and not dry:
        await asyncio.to_thread(give_back, settings.store.url)
    return swept


def in_words(swept: Swept) -> str:
    """Return the result as one line of text."""
    by = ", ".join(f"{count} {fate}" for fate, count in sorted(swept.deleted.items()))
    text = f"{swept.deleted.total()} episodes{f' ({by})' if by else ''} with {swept.calls} calls"
    if swept.needed:
        kept = ", ".join(f"{count} because {_NEEDED[why]}" for why, count in sorted(swept.needed.items()))
        text += f"; kept, though old enough: {kept}"
    return text


async def delete_episode(database: Database, episode_id: str, *, force: bool) -> dict[str, Any]:
    """Delete a closed episode: what it was, and its number of calls. Raise NotFound, or Conflict where it must stay."""

    def write(connection: Connection) -> dict[str, Any]:
        found = retention.closed(connection, episode_id)
        if found is None:
            if statements.episode(connection, episode_id) is None:
                raise NotFound(f"no episode {episode_id!r}", code="no_episode")
            message = f"episode {episode_id} is not closed: reward, close or abandon it first"
            raise Conflict(message, code="episode_open")
        if found.needed is not None and not (force and found.needed not in _FINAL):
            text = "" if found.needed in _FINAL else "; `?force=true` deletes it all the same"
            message = f"episode {episode_id} is kept: {_NEEDED[found.needed]}{text}"
            raise Conflict(message, code="episode_needed")
        if found.fate == "trained" and not force:
            message = (
                f"batch {found.batch} was trained on episode {episode_id}, and cannot be read again without it;"
                " `?force=true` deletes it all the same"
            )
            raise Conflict(message, code="episode_trained")
        retention.remove(connection, [found], "requested")
        return {"was": found.fate, "calls": found.calls}

    return await database.submit(write)
