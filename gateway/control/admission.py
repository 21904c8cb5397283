"""Who may start: episodes join their model's ledger, or wait until a slot may be theirs.

Owns the queues of those that wait, first come, first served. What ends a request with a refusal is stored; waiting is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from gateway.errors import Busy, Conflict, jittered
from gateway.feed.ledger import StoredLedger
from gateway.store import episodes as statements
from gateway.store.database import Database
from gateway.store.decisions import Decision, insert_decisions
from scheduler.policies.staleness_events import Join, Refuse

_REFUSALS = {
    "group_full": "all members of group {} have joined",
    "group_finished": "group {} is finished",
    "group_closed": "group {} is closed",
    "size_differs": "group {} was begun with another group_size",
}


@dataclass(slots=True)
class _Waiting:
    """A group whose members wait for a slot."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    members: int = 0


class Admission:
    """The way into the ledgers; `ledgers`: of each trained model."""

    def __init__(self, database: Database, ledgers: Mapping[str, StoredLedger], max_wait_s: float) -> None:
        self._database = database
        self._ledgers = ledgers
        self._max_wait_s = max_wait_s
        self._waiting: dict[str, dict[str, _Waiting]] = {model: {} for model in ledgers}
        for model, ledger in ledgers.items():
            ledger.on_change = partial(self._wake, model)

    async def join(self, event: Join, row: dict[str, Any], wait_s: float) -> None:
        """Stores the episode `row`, and its version in it, once the ledger admits it.

        Raises Busy if there is no slot within `wait_s`, Conflict if the group takes no more.
        """
        until = time.monotonic() + min(wait_s, self._max_wait_s)
        model = row["model"]
        ledger = self._ledgers[model]
        while True:
            row["version"] = ledger.ledger.version
            commands = await ledger.apply(event, lambda c: statements.insert_episode(c, row))
            if not isinstance(commands[0], Refuse):
                return
            reason = commands[0].reason
            if reason != "no_slot":
                await self._tell(model, event, reason)
                raise Conflict(_REFUSALS[reason].format(event.group_id), code=reason)
            left = until - time.monotonic()
            if left <= 0:
                await self._tell(model, event, reason)
                raise Busy(
                    "no slot is free within the staleness bound", retry_after=jittered(2.0), code=reason
                )
            await self._wait(self._waiting[model], event.group_id, left)

    def waiting(self, model: str) -> dict[str, int]:
        """How many episodes of each group wait for a slot, first come first."""
        return {group_id: waiting.members for group_id, waiting in self._waiting[model].items()}

    async def _tell(self, model: str, event: Join, reason: str) -> None:
        refused = Decision("refused", event.group_id, event.episode_id, reason)
        await self._database.submit(lambda c: insert_decisions(c, model, [refused]))

    @staticmethod
    async def _wait(queue: dict[str, _Waiting], group_id: str, timeout_s: float) -> None:
        """Until a slot may be the group's, or the time is up. All members of a group are woken together."""
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

    def _wake(self, model: str) -> None:
        """Wakes as many groups as there are slots, and no more: every one would ask the ledger again."""
        queue = self._waiting[model]
        for group_id in list(islice(queue, self._ledgers[model].ledger.free_slots())):
            queue.pop(group_id).woken.set()
