"""Leases: how a buffer's groups reach a trainer, and how it says that they were trained.

One buffer is leased at a time: the next to train. A lease has a deadline, and a fencing number that grows with every lease and
comes from SQL; an answer with an older number is refused, so two trainers can never both consume a buffer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from sqlalchemy import Connection

from gateway.errors import Conflict, NotFound
from gateway.feed.ledger import StoredLedger
from gateway.settings import FeedSettings
from gateway.store import episodes, turns
from gateway.store import ledger as statements
from gateway.store.database import Database
from gateway.types import Episode, Group, Int32Array, Lease, LeasedGroups, Node, TokenFlag
from scheduler.policies.staleness_events import Consume, Leased

Orphans = Callable[[], Collection[int]]


@dataclass(slots=True)
class _Held:
    lease: Lease
    consumer: str
    deadline: float


class Leases:
    """The feed of one trained model."""

    def __init__(
        self,
        database: Database,
        ledger: StoredLedger,
        settings: FeedSettings,
        orphans: Orphans,
        fence: int,
    ) -> None:
        self._database = database
        self._orphans = orphans
        self._ledger = ledger
        self._settings = settings
        self._fence = fence
        self._held: _Held | None = None

    @classmethod
    async def load(
        cls, database: Database, ledger: StoredLedger, settings: FeedSettings, orphans: Orphans = lambda: ()
    ) -> Leases:
        """Goes on with fencing numbers after the newest that was given out. `orphans`: versions whose tokens do not count."""
        fence = await database.read(lambda c: statements.newest_fence(c, ledger.model))
        return cls(database, ledger, settings, orphans, fence)

    async def lease(self, consumer: str) -> Lease:
        """Leases the next buffer. A consumer that comes again takes its own lease over. Raises Conflict."""
        held, model = self._held, self._ledger.model
        if held and held.consumer != consumer and time.monotonic() < held.deadline:
            raise Conflict(f"buffer {held.lease.buffer} is leased to {held.consumer!r}", code="lease_held")
        self._fence += 1
        fence, buffer = self._fence, self._ledger.ledger.consumed
        batch = self._ledger.ledger.settings.batch
        lease = Lease(f"lease-{secrets.token_hex(8)}", buffer, batch, fence, self._settings.lease_s)
        self._held = _Held(lease, consumer, time.monotonic() + self._settings.lease_s)
        row = {
            "fence": fence,
            "id": lease.lease_id,
            "model": model,
            "buffer": buffer,
            "consumer": consumer,
            "state": "held",
        }

        def write(connection: Connection) -> None:
            if held:
                statements.end_lease(connection, model, held.lease.fence, "superseded")
            statements.insert_lease(connection, row)

        await self._ledger.apply(Leased(buffer), write)
        return lease

    async def groups(self, lease_id: str, fence: int, cursor: int, wait_s: float) -> LeasedGroups:
        """The groups of a leased buffer after `cursor`; waits up to `wait_s` for one."""
        lease = self._check(lease_id, fence).lease
        until = time.monotonic() + min(wait_s, self._settings.max_wait_s)
        while len(entries := self._ledger.ledger.entries(lease.buffer)) <= cursor < lease.size:
            left = until - time.monotonic()
            if left <= 0:
                break
            await self._ledger.changed(left)
            self._check(lease_id, fence)
        found: tuple[Group, ...] = ()
        if wanted := list(entries[cursor:]):
            await self._database.settled()  # the ledger knows of a reward a moment before it is committed
            found = await self._read(wanted)
        return LeasedGroups(found, len(entries), len(entries) >= lease.size)

    def renew(self, lease_id: str, fence: int) -> None:
        """Starts the lease's deadline anew."""
        held = self._check(lease_id, fence)
        held.deadline = time.monotonic() + self._settings.lease_s

    async def ack(self, lease_id: str, fence: int, checkpoint: str) -> None:
        """The buffer was trained. Raises Conflict if it was not even whole."""
        lease, model = self._check(lease_id, fence).lease, self._ledger.model
        try:
            await self._ledger.apply(
                Consume(lease.buffer), lambda c: statements.end_lease(c, model, fence, "acked", checkpoint)
            )
        except ValueError as error:
            raise Conflict(str(error), code="buffer_not_ready") from error
        self._held = None

    async def nack(self, lease_id: str, fence: int, reason: str) -> None:
        """The buffer was not trained; the next lease is of the same buffer."""
        self._check(lease_id, fence)
        self._held, model = None, self._ledger.model
        await self._database.submit(lambda c: statements.end_lease(c, model, fence, "nacked", reason=reason))

    def _check(self, lease_id: str, fence: int) -> _Held:
        held = self._held
        if held is None or held.lease.lease_id != lease_id:
            raise NotFound(f"no lease {lease_id!r} is held; lease again", code="no_lease")
        if held.lease.fence != fence:
            raise Conflict(f"fence {fence} is not that of {lease_id}", code="fenced")
        if time.monotonic() > held.deadline:
            raise Conflict(f"{lease_id} has ended: it was not renewed in time", code="lease_expired")
        return held

    async def _read(self, group_ids: list[str]) -> tuple[Group, ...]:
        versions = {group.group_id: group.version for group in self._ledger.ledger.groups()}
        orphans = np.asarray(sorted(self._orphans()), np.int32)

        def query(connection: Connection) -> tuple[Group, ...]:
            rows = episodes.rewarded(connection, group_ids)
            nodes = turns.nodes(connection, self._ledger.model, [row["id"] for row in rows])
            members: dict[str, list[Episode]] = {group_id: [] for group_id in group_ids}
            tasks: dict[str, str] = {}
            for row in rows:
                tasks[row["group_id"]] = row["task_id"]
                found = tuple(_without(node, orphans) for node in nodes[row["id"]])
                members[row["group_id"]].append(Episode(row["id"], row["reward"], found))
            return tuple(Group(g, tasks[g], versions[g], tuple(members[g])) for g in group_ids)

        return await self._database.read(query)


def _without(node: Node, orphans: Int32Array) -> Node:
    """The node, its tokens of orphaned versions flagged."""
    flagged = np.isin(node.versions, orphans)
    if not flagged.any():
        return node
    return replace(node, flags=node.flags | (flagged * np.uint8(TokenFlag.ORPHANED)))
