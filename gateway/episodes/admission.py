"""Admission of episodes: each joins its model's ledger, or waits until a slot may be free. Owns the queues of waiting episodes,
first come, first served. A refusal that ends a request is stored; a wait is not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from gateway.store import episodes as statements
from gateway.store.database import Database
from gateway.store.decisions import Decision, insert_decisions
from gateway.store.records import NewEpisode
from gateway.training_feed.full import no_slot
from gateway.training_feed.ledger import LedgerListener, StoredLedger
from headgate.errors import Busy, Conflict, jittered
from scheduler.policies.staleness_events import Command, Join, Refuse

log = logging.getLogger(__name__)

_REFUSALS = {
    "group_full": "all members of group {} have joined",
    "group_finished": "group {} is finished",
    "group_closed": "group {} is closed",
    "size_differs": "group {} was begun with another group_size",
}


Entered = Callable[[str], None]
"""Called once an episode is stored as open, with the reason if the ledger has given it up by then."""
_MAX_WAIT_S = 300.0
"""The longest `?wait=` of a request to open an episode: drivers repeat it."""


@dataclass(slots=True)
class _Waiting:
    """A group whose members wait for a slot."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    members: int = 0


class Admission(LedgerListener):
    """The way into the ledgers; `ledgers`: of each trained model."""

    def __init__(
        self,
        database: Database,
        ledgers: Mapping[str, StoredLedger],
        engine_version: Callable[[str], int | None] = lambda _model: None,
    ) -> None:
        """`engine_version`: the version of the engine that would sample a model's new call; None: `min_version` is the newest
        version."""
        self._database = database
        self._ledgers = ledgers
        self._engine_version = engine_version
        self._joining: dict[str, str] = {}
        """Episodes whose place is being committed, and the reason if the ledger has given them up by then."""
        self._entering: set[asyncio.Task[list[Command]]] = set()
        self._waiting: dict[str, dict[str, _Waiting]] = {model: {} for model in ledgers}
        for ledger in ledgers.values():
            ledger.subscribe(self)

    async def close(self) -> None:
        """Stop waiting for commits."""
        for task in self._entering:
            task.cancel()
        await asyncio.gather(*self._entering, return_exceptions=True)

    def abort(self, episode_id: str, reason: str) -> None:
        """Record that the ledger gave an episode up, perhaps before its place was committed."""
        if episode_id in self._joining:
            self._joining[episode_id] = reason

    async def insert(self, row: NewEpisode, entered: Entered) -> None:
        """Store the episode `row` without a place in a ledger; `entered`: as for `join`."""

        async def enter() -> list[Command]:
            row["version"] = self._ledgers[row["model"]].rule.version
            await self._database.submit(lambda c: statements.insert_episode(c, row))
            entered("")
            return []

        await self._enter(enter(), row)

    async def join(self, event: Join, row: NewEpisode, wait_s: float, entered: Entered) -> None:
        """Store the episode `row`, with its version, once the ledger admits it. `entered` is called with the commit, even if the
        caller no longer waits.

        Raise Busy if there is no slot within `wait_s`, Conflict if the group takes no more members.
        """
        until = time.monotonic() + min(wait_s, _MAX_WAIT_S)
        model = row["model"]
        while True:
            commands = await self._enter(self._apply(event, row, entered), row)
            if not isinstance(commands[0], Refuse):
                return
            reason = commands[0].reason
            if reason != "no_slot":
                await self._record_refusal(model, event, reason)
                raise Conflict(_REFUSALS[reason].format(event.group_id), code=reason)
            left = until - time.monotonic()
            if left <= 0:
                await self._record_refusal(model, event, reason)
                raise Busy(no_slot(self._ledgers[model].rule), retry_after=jittered(2.0), code=reason)
            await self._wait(self._waiting[model], event.group_id, left)

    async def _apply(self, event: Join, row: NewEpisode, entered: Entered) -> list[Command]:
        ledger = self._ledgers[row["model"]]
        event = replace(event, version=self._engine_version(row["model"]))
        row["version"] = ledger.rule.version_of(event)
        self._joining[event.episode_id] = ""
        try:
            commands = await ledger.apply(event, lambda c: statements.insert_episode(c, row))
            given_up = self._joining[event.episode_id]
        finally:
            del self._joining[event.episode_id]
        if not isinstance(commands[0], Refuse):
            entered(given_up)
        return commands

    async def _enter(self, entering: Coroutine[Any, Any, list[Command]], row: NewEpisode) -> list[Command]:
        """Wait for an admission's commit. A caller that stops waiting does not stop it: what is committed must be known."""
        task = asyncio.create_task(entering, name=f"enter-{row['id']}")
        self._entering.add(task)
        task.add_done_callback(self._entered)
        return await asyncio.shield(task)

    def _entered(self, task: asyncio.Task[list[Command]]) -> None:
        self._entering.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.info("%s failed: %s", task.get_name(), error)

    def waiting(self, model: str) -> dict[str, int]:
        """Return the number of episodes of each group that wait for a slot, first come first."""
        return {group_id: waiting.members for group_id, waiting in self._waiting[model].items()}

    async def _record_refusal(self, model: str, event: Join, reason: str) -> None:
        refused = Decision("refused", event.group_id, event.episode_id, reason)
        await self._database.submit(lambda c: insert_decisions(c, model, [refused]))

    @staticmethod
    async def _wait(queue: dict[str, _Waiting], group_id: str, timeout_s: float) -> None:
        """Wait until a slot may be the group's, or the time is up. All members of a group are woken together."""
        waiting = queue.setdefault(group_id, _Waiting())
        waiting.members += 1
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.woken.wait()
        except TimeoutError:
            return
        finally:
            waiting.members -= 1
            if not waiting.members and queue.get(group_id) is waiting:
                del queue[group_id]

    def ledger_changed(self, model: str) -> None:
        """Wake as many groups as there are slots, and no more: every one would query the ledger again."""
        queue = self._waiting[model]
        for group_id in list(islice(queue, self._ledgers[model].rule.free_slots())):
            queue.pop(group_id).woken.set()
