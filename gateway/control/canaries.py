"""Tries a version on a share of the new conversations before all others get it, and decides (docs/guide/live.md).

Owns a model's running trial: its row in the store, and what its ended conversations were like, which is read from the store
again after a restart. Invariants: a version has one trial, whose outcome is stored once, with the figures by which it was
decided; while it runs, `EnginePool.trial` has it, so that each conversation gets the version that was drawn for it. `versions`
carries an outcome out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from typing import Any

from gateway.config import UpdateSettings
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from gateway.generation.trial import Trial
from gateway.store import canaries as statements
from gateway.store.database import Database, Write
from gateway.store.records import CanaryRecord
from headgate.errors import Conflict
from scheduler.policies.canary import Arm, CanaryTest, Conversation, Decision, Outcome, reward_range
from scheduler.program.events import Canary

log = logging.getLogger(__name__)
_LOOK_S = 1.0
_OVERLAP_S = 60.0
"""How much later than a conversation's end it may be committed."""
_HISTORY = 1000
"""The newest live rewards that define the range of a trial's."""
_SHOWN = 20
"""The newest trials that are shown."""


class Canaries:
    """The trials of one model."""

    def __init__(
        self,
        model: str,
        settings: UpdateSettings,
        agents: frozenset[str],
        database: Database,
        pool: EnginePool,
    ) -> None:
        """`agents`: those in daily use whose conversations are with the model."""
        self._model = model
        self._settings = settings
        self._agents = agents
        self._database = database
        self._pool = pool
        self._row: CanaryRecord | None = None
        """The running trial."""
        self._choosing: int | None = None
        """The version for whose trial engines are chosen."""
        self._test = CanaryTest(1, 0.0, 1.0)
        self._seen: dict[str, float] = {}
        """The ends of conversations that were counted."""
        self._newest: deque[dict[str, Any]] = deque(maxlen=_SHOWN)
        """The conversations that were counted last."""
        self._decision: Decision | None = None
        """What a person decided."""
        self._changed = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def on(self) -> bool:
        """True if a version is tried before it is live."""
        return bool(self._settings.canary and self._agents)

    def why(self, version: int) -> str:
        """Return why a version that is on trial is not live yet; empty for others."""
        if self._choosing == version:
            return "its trial waits until two engines are open"
        if self._row is None or self._row["version"] != version:
            return ""
        return f"held by a person; {self._test.progress}" if self._row["held"] else self._test.progress

    async def resume(self, version: int) -> bool:
        """Continue the trial of a version that the store has. Return False if there is none to continue."""
        row = await self._database.read(lambda c: statements.canary(c, self._model, version))
        if row is None or row["outcome"]:
            return False
        self._enter(row)
        return True

    async def engines(self, version: int, live: int) -> Canary:
        """Choose the engines of a trial: as few as cover the share, those with the fewest calls. Wait until two are open."""
        self._choosing = version
        try:
            await self._pool.wait_until(lambda: len(self._open()) > 1, None)
        finally:
            self._choosing = None
        slots = sorted(self._open(), key=lambda slot: (slot.streams, slot.name))
        count = min(max(1, math.ceil(self._settings.canary * len(slots))), len(slots) - 1)
        return Canary(live, tuple(slot.name for slot in slots[:count]))

    def _open(self) -> list[Slot]:
        return [slot for slot in self._pool.slots.values() if slot.state == "open"]

    async def run(self, version: int, canary: Canary) -> Decision:
        """Try a version, which the engines of `canary` run, until it is decided."""
        if self._row is None and not await self.resume(version):
            await self._begin(version, canary.live)
        while (decision := await self._decided(canary)) is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
        log.warning("version %d of %s is %s: %s", version, self._model, decision.outcome, decision.why)
        return decision

    def ending(self, version: int, decision: Decision) -> Write:
        """Return the statement that stores an outcome, for the transaction of what follows from it."""
        values = self._model, version, decision.outcome, decision.why, self._test.figures()
        return lambda connection: statements.end(connection, *values)

    async def _begin(self, version: int, live: int) -> None:
        """Begin a trial in memory first: a conversation that is opened in the meantime already has its version."""
        rewards = await self._database.read(
            lambda c: statements.live_rewards(c, self._model, self._agents, _HISTORY)
        )
        low, high = reward_range(rewards)
        row: CanaryRecord = {
            "model": self._model,
            "version": version,
            "live": live,
            "share": self._settings.canary,
            "conversations": self._settings.canary_conversations,
            "low": low,
            "high": high,
            "began_at": time.time(),
            "held": False,
            "outcome": "",
            "why": "",
            "ended_at": None,
            "figures": None,
        }
        self._enter(row)
        await self._database.submit(lambda c: statements.begin(c, row))

    def _enter(self, row: CanaryRecord) -> None:
        self._row, self._seen, self._decision = row, {}, None
        self._newest.clear()
        self._test = CanaryTest(row["conversations"], row["low"], row["high"])
        self._over.clear()
        self._pool.begin_trial(
            Trial(row["version"], row["live"], row["share"], row["began_at"], self._agents)
        )

    async def _decided(self, canary: Canary) -> Decision | None:
        """Count what has ended since the last time; return what follows."""
        assert self._row is not None
        await self._read(self._row)
        if self._decision is not None:
            return self._decision
        slots = [slot for name in canary.engines if (slot := self._pool.slots.get(name)) is not None]
        if all(slot.given_up for slot in slots):  # also if none is left
            reasons = "; ".join(f"{slot.name}: {slot.reason}" for slot in slots)
            return Decision("returned", f"no engine of its trial is left: {reasons or 'they were removed'}")
        return None if self._row["held"] else self._test.decision

    async def _read(self, row: CanaryRecord) -> None:
        trial = self._pool.trial
        assert trial is not None
        newest = max(self._seen.values(), default=row["began_at"])
        since = row["began_at"], max(row["began_at"], newest - _OVERLAP_S)
        ended = await self._database.read(
            lambda c: statements.ended_conversations(c, self._model, self._agents, *since)
        )
        self._seen = {name: at for name, at in self._seen.items() if at >= since[1]}
        for one in ended:
            if one.episode_id in self._seen:
                continue
            self._seen[one.episode_id] = one.closed_at
            if one.calls or one.refused:
                tries = trial.tries(one.agent, one.created_at, one.episode_id)
                facts = one.reward, one.tokens, one.seconds, one.faulty, one.refused
                arm: Arm = "candidate" if tries else "live"
                self._test.add(Conversation(arm, *facts))
                counted = {"episode_id": one.episode_id, "arm": arm, "reward": one.reward}
                self._newest.appendleft({**counted, "at": one.closed_at})

    def end(self, *, promoted: bool) -> None:
        """End the running trial: its conversations may have any engine again."""
        self._row = None
        self._pool.end_trial(promoted=promoted)
        self._over.set()

    # What a person does

    async def hold(self, *, held: bool) -> None:
        """Leave the decision to a person, or to the test again. Raise Conflict if no trial runs."""
        row = self._running()
        await self._database.submit(lambda c: statements.hold(c, self._model, row["version"], held=held))
        row["held"] = held
        self._changed.set()

    async def decide(self, outcome: Outcome) -> None:
        """End the running trial by a person's decision; return when it is carried out. Raise Conflict if no trial runs."""
        self._running()
        self._decision = Decision(outcome, f"a person has decided so; {self._test.progress}")
        self._changed.set()
        await self._over.wait()

    def _running(self) -> CanaryRecord:
        if self._row is None:
            message = f"no version of {self._model!r} is on trial"
            raise Conflict(message, code="no_trial")
        return self._row

    async def describe(self) -> dict[str, Any]:
        """Return the settings, the running trial with its figures so far, and the newest trials that have ended."""
        running = None
        if (row := self._row) is not None:
            engines = [
                {"name": slot.name, "state": slot.state, "version": slot.version, "streams": slot.streams}
                for slot in self._pool.slots.values()
            ]
            running = {
                **row,
                "why": self.why(row["version"]),
                "figures": self._test.figures(),
                "engines": engines,
                "newest": list(self._newest),
            }
        return {
            "model": self._model,
            "share": self._settings.canary if self._agents else 0.0,
            "conversations": self._settings.canary_conversations,
            "running": running,
            "ended": await ended_trials(self._database, self._model),
        }


async def ended_trials(database: Database, model: str) -> list[CanaryRecord]:
    """Return the newest trials that have ended, the newest first."""
    newest = await database.read(lambda c: statements.newest(c, model, _SHOWN))
    return [row for row in newest if row["outcome"]]
