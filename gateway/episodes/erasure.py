"""Deletes the conversations of one agent or of one of its users, and names the versions that were trained from them.

Owns nothing: the store has every deletion (gateway/store/erasure.py), and a coordinator that starts goes on with those that
another one has begun. Conversations that are open are closed first (`deleted`), those that are being graded are erased once they
are closed. What a batch waits for keeps its place and its reward, without a token to train.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from contextlib import suppress
from functools import partial
from typing import Any

from sqlalchemy import Connection

from gateway.config.settings import Settings
from gateway.episodes.episodes import Episodes
from gateway.render.redaction import Redactor
from gateway.store import clock, erasure
from gateway.store.connections import shorten_log
from gateway.store.database import Database
from gateway.store.erasure import Deletion
from gateway.store.retention import Place
from headgate.errors import GatewayError
from headgate.types import DELETED

log = logging.getLogger(__name__)


class Erasure:
    """The deletions of a coordinator."""

    def __init__(
        self, settings: Settings, database: Database, episodes: Episodes, redactor: Redactor
    ) -> None:
        self._settings = settings
        self._database = database
        self._episodes = episodes
        self._redactor = redactor
        self._lock = asyncio.Lock()

    async def delete(self, agent: str, user: str | None) -> dict[str, Any]:
        """Delete the conversations of an agent's user, or without one all of the agent, as of now. Return its report.

        What is being graded is erased later, and the report's `waiting` counts it.
        """
        users = [] if user is None else sorted({user, self._redactor.text(user)})
        deletion = Deletion(f"del-{secrets.token_hex(8)}", time.time(), None, agent, users, [])
        await self._database.submit(lambda c: erasure.add(c, deletion))
        await self.tend()
        return next(row for row in await self.reports() if row["id"] == deletion.id)

    async def tend(self) -> None:
        """Go on with the deletions that are not done."""
        async with self._lock:
            for deletion in await self._database.read(lambda c: erasure.deletions(c, unfinished=True)):
                await self._pursue(deletion)

    async def expire(self) -> None:
        """Erase the contents of conversations that are older than their agent allows (`[agents.NAME] keep_days`)."""
        now = await self._database.read(clock.now)
        for agent, given in self._settings.agents.items():
            if given.keep_days is not None:
                await self._expire(agent, now, now - given.keep_days * 86_400)

    async def _expire(self, agent: str, now: float, before: float) -> None:
        name = f"exp-{time.strftime('%Y-%m-%d', time.gmtime(now))}-{hashlib.blake2b(agent.encode(), digest_size=8).hexdigest()}"
        place: Place | None = None
        while True:
            some, place = await self._database.read(
                partial(erasure.expired, agent=agent, before=before, after=place)
            )
            if some:
                deletion = Deletion(name, now, now, agent, [], some)
                await self._database.submit(partial(erasure.expire, deletion=deletion))
            if place is None:
                return

    async def reports(self) -> list[dict[str, Any]]:
        """Return the newest deletions, without whom they were for."""
        return await self._database.read(_reports)

    async def _pursue(self, deletion: Deletion) -> None:
        found = await self._database.read(lambda c: erasure.found(c, deletion))
        for episode_id, state in found.items():
            if state != "closed":
                with suppress(GatewayError):  # it is being graded, or was closed in the meantime
                    await self._episodes.abandon(episode_id, DELETED)
        left = await self._database.read(lambda c: erasure.found(c, deletion))
        closed = [one for one, state in left.items() if state == "closed"]
        for start in range(0, len(closed), erasure.PORTION):
            some = closed[start : start + erasure.PORTION]
            await self._database.submit(partial(erasure.erase, deletion_id=deletion.id, episode_ids=some))
        if all(state == "closed" for state in left.values()):
            now = time.time()
            await self._database.submit(lambda c: erasure.finish(c, deletion.id, now))
            await asyncio.to_thread(shorten_log, self._settings.store.url)
            log.info("deletion %s is done: %d episodes", deletion.id, len(deletion.episodes) + len(left))


def _reports(connection: Connection) -> list[dict[str, Any]]:
    rows = []
    for deletion in erasure.deletions(connection):
        waiting = 0 if deletion.done_at else len(erasure.found(connection, deletion))
        rows.append({
            "id": deletion.id,
            "agent": deletion.agent,
            "requested_at": deletion.at,
            "done_at": deletion.done_at,
            "waiting": waiting,
            "episodes": deletion.episodes,
            "versions": erasure.learned(connection, deletion.episodes),
            "leased": erasure.leased(connection, deletion.episodes),
        })  # fmt: skip
    return rows
