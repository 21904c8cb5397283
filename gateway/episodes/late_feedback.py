"""Rewards that arrive after a conversation's end (`[agents.NAME] feedback_s`).

A conversation that ended without a reward has given its place away. With its feedback it is `fed_back`: it waits, without a
place, until a batch within its bound has a free entry, takes that under a new group, and is rewarded. If its tokens become
too old before that, or it is not trained anyway, its reward is that of an evaluation.

Owns the episodes that wait. Invariants: what waits is in the store (`fed_back`), so a restart goes on with it; a place is taken
only together with a reward that is there; no token is trained beyond the bound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from sqlalchemy import Connection

from gateway.config.settings import Settings
from gateway.episodes.open_episode import CALLS, closed
from gateway.store import episodes as statements
from gateway.store import turns
from gateway.store.database import Database
from gateway.store.records import EpisodeRecord
from gateway.training_feed.ledger import StoredLedger
from headgate.end_reasons import FED_BACK, REWARDED
from headgate.errors import BadRequest, Conflict, NotFound
from headgate.types import EpisodeMode
from scheduler.policies.staleness_events import Join, Refuse, Reward

log = logging.getLogger(__name__)

Outcome = Literal["rewarded", "waits", "eval"]
"""What became of a reward: it is in a batch, it waits for a place in one, or it is that of an evaluation."""
_UNREWARDED = ("idle_deadline", "not_judged", "total_deadline", FED_BACK)
"""The ends after which feedback is accepted."""
STALE = "stale"


class LateFeedback:
    """The late feedback of a coordinator; `ledgers`: of each trained model."""

    def __init__(self, settings: Settings, database: Database, ledgers: Mapping[str, StoredLedger]) -> None:
        self._settings = settings
        self._database = database
        self._ledgers = ledgers
        self._waiting: dict[str, None] = {}
        """The episodes that wait, the first first."""
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Take over the episodes that waited when the gateway stopped."""
        longest = max((agent.feedback_s or 0.0 for agent in self._settings.agents.values()), default=0.0)
        if longest:
            since = time.time() - longest
            found = await self._database.read(lambda c: statements.closed_since(c, since, FED_BACK))
            self._waiting = dict.fromkeys(found)

    def waiting(self) -> int:
        """Return the number of episodes that wait."""
        return len(self._waiting)

    async def reward_call(self, episode_id: str, call_id: str, reward: float) -> Outcome:
        """Reward a call of a closed conversation, in place of an earlier reward. Raise NotFound, BadRequest, or Conflict if it is
        too late."""
        async with self._lock:
            row = await self._database.read(lambda c: statements.episode(c, episode_id))
            if row is None:
                raise NotFound(f"no episode {episode_id!r}", code="no_episode")
            self._check(row)
            if not await self._database.read(lambda c: turns.has_call(c, episode_id, call_id)):
                raise NotFound(f"episode {episode_id!r} has no recorded call {call_id!r}", code="no_call")
            given = await self._database.read(lambda c: turns.rewards(c, episode_id))
            for value in (reward, sum({**given, call_id: reward}.values())):
                if refusal := self._settings.rewards.refusal(value):
                    raise BadRequest(refusal, code="invalid_value", param="reward")

            def write(connection: Connection) -> None:
                turns.set_reward(connection, episode_id, call_id, reward)
                statements.wait_for_place(connection, episode_id, FED_BACK)

            await self._database.submit(write)
            self._waiting[episode_id] = None
            return await self._settle(episode_id)

    async def tend(self) -> None:
        """Give places to what waits, the first first."""
        for episode_id in list(self._waiting):
            async with self._lock:
                await self._settle(episode_id)

    def _check(self, row: EpisodeRecord) -> None:
        agent = self._settings.agents.get(row["agent"])
        limit = agent.feedback_s if agent is not None else None
        if row["state"] != "closed" or row["reason"] not in _UNREWARDED or limit is None:
            raise closed(row["id"], row["reason"])
        if time.time() - (row["closed_at"] or 0.0) > limit:
            message = f"episode {row['id']} was closed more than {limit:g} s ago ([agents.{row['agent']}] feedback_s)"
            raise Conflict(message, code="episode_closed")

    async def _settle(self, episode_id: str) -> Outcome:
        """Reward an episode that waits, if its batch has a place for it, or if it has become too old. Called under the lock."""
        row = await self._database.read(lambda c: statements.episode(c, episode_id))
        if row is None or row["reason"] != FED_BACK:  # deleted in the meantime
            self._waiting.pop(episode_id, None)
            return "eval"
        oldest = await self._database.read(lambda c: _oldest(c, row["model"], episode_id))
        ledger = self._ledgers[row["model"]]
        if row["mode"] == "eval" or oldest is None:
            return await self._end(row, "eval")
        if not ledger.decision_log.has(episode_id):
            first = max(ledger.rule.version, ledger.rule.next_batch)
            if oldest + self._settings.staleness_of(row["model"]).eta < first:
                return await self._end(row, "eval", notice=STALE)
            if not await self._join(ledger, row, oldest):
                return "waits"
        return await self._end(row, "train")

    async def _join(self, ledger: StoredLedger, row: EpisodeRecord, oldest: int) -> bool:
        """Give an episode a place in a batch within the bound of its oldest token. Return False if none is free."""
        group = f"late-{row['id']}"
        join = Join(group, row["id"], 1, oldest)
        if ledger.rule.version_of(join) != oldest:
            return False
        commands = await ledger.apply(join, lambda c: statements.change_group(c, row["id"], group))
        return not any(isinstance(command, Refuse) for command in commands)

    async def _end(self, row: EpisodeRecord, mode: EpisodeMode, notice: str = "") -> Outcome:
        """Store the reward; in training also in the ledger, where the episode has joined."""
        rewards = await self._database.read(lambda c: turns.rewards(c, row["id"]))
        total = sum(rewards.values())
        values: dict[str, Any] = {
            "reason": REWARDED,
            "reward": total,
            "components": {CALLS: total},
            "mode": mode,
        }
        if notice:
            values["notice"] = notice
        if mode == "train":
            try:
                write = self._write(row["id"], values)
                commands = await self._ledgers[row["model"]].apply(Reward(row["id"], total), write)
            except ValueError as error:
                log.warning("the ledger refused a late reward: %s", error)
                commands = [Refuse(row["id"], "group_finished")]
            if any(isinstance(command, Refuse) for command in commands):
                return await self._end(row, "eval", notice=STALE)
        else:
            await self._database.submit(self._write(row["id"], values))
        self._waiting.pop(row["id"], None)
        return "rewarded" if mode == "train" else "eval"

    @staticmethod
    def _write(episode_id: str, values: dict[str, Any]) -> Any:
        return lambda connection: statements.close_episode(connection, episode_id, values)


def _oldest(connection: Connection, model: str, episode_id: str) -> int | None:
    """Return the oldest version that sampled a token which may be trained; None if it has none."""
    found = [
        int(np.min(turn.versions))
        for turn in turns.sampled(connection, model, [episode_id])
        if not turn.mask_reason and len(turn.versions)
    ]
    return min(found, default=None)
