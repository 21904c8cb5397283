"""Takes training episodes out of their batches while their runs go on as evaluation.

Invariant: an episode becomes evaluation in memory first, so that no reward of it reaches a ledger from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from gateway.config.settings import Settings
from gateway.episodes.open_episode import OpenEpisode
from gateway.store import episodes as statements
from gateway.store.database import Database, Write
from gateway.training_feed.ledger import StoredLedger
from scheduler.policies.staleness_events import Drop, Refuse

log = logging.getLogger(__name__)


class Demotion:
    """`ledgers`: of each trained model."""

    def __init__(self, settings: Settings, database: Database, ledgers: Mapping[str, StoredLedger]) -> None:
        self._settings = settings
        self._database = database
        self._ledgers = ledgers

    async def demote(self, live: OpenEpisode, reason: str) -> None:
        """Take an open training episode out of its batch. Do nothing for other episodes."""
        if live.mode != "train" or live.state != "open":
            return
        live.leave_training()
        write = _write(live, reason)
        commands = await self._ledgers[live.model].apply(Drop(live.id, reason), write)
        if any(isinstance(command, Refuse) for command in commands):  # the ledger had given it up before
            await self._database.submit(write)

    def demote_aborted(self, live: OpenEpisode, reason: str) -> bool:
        """Keep an open conversation of a live agent that its ledger has given up. Return False for other episodes."""
        agent = self._settings.agents.get(live.agent) if live.opening else None
        if agent is None or not agent.live or live.state != "open":
            return False
        live.leave_training()
        # The ledger's event was put before: a process that dies in between finds an episode that no ledger takes.
        self._database.put(_write(live, reason)).add_done_callback(partial(_log_failure, live.id))
        return True


def _write(live: OpenEpisode, reason: str) -> Write:
    return lambda connection: statements.leave_training(connection, live.id, reason)


def _log_failure(episode_id: str, stored: asyncio.Future[None]) -> None:
    if not stored.cancelled() and (error := stored.exception()):
        log.error("it was not stored that episode %s is evaluation from now on: %s", episode_id, error)
