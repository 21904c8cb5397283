"""Leases: how a trainer gets a batch's groups, and how it reports that they were trained.

Only the next batch to train can be leased. A lease has a deadline and a fencing number from SQL, which grows with every lease;
reports with an older number are refused, so two trainers can never both consume a batch. Leases are stored with their deadlines,
so they survive a restart of the gateway. A lease ends with its `ack` or `nack`, when another consumer leases after
its deadline, when its own consumer leases again, or when its batch is passed over. If the response to an `ack` or `nack` was
lost, it may be repeated, and gets the same response.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from gateway.config import FeedSettings
from gateway.store import ledger as statements
from gateway.store.database import Database
from gateway.store.decisions import Decision, insert_decisions
from gateway.training_feed.groups import GroupReader
from gateway.training_feed.ledger import StoredLedger
from headgate.errors import Conflict, NotFound
from headgate.types import Group, Lease, LeasedGroups
from scheduler.policies.staleness_events import Consume, Leased, Returned

_MAX_WAIT_S = 60.0
"""The longest `?wait=` of a request for groups: trainers request again."""


@dataclass(slots=True)
class _Current:
    lease: Lease
    consumer: str
    deadline: float
    """On the monotonic clock, which a change of the machine's time does not move."""

    def expired(self) -> bool:
        return time.monotonic() > self.deadline


class Leases:
    """The feed of one trained model."""

    def __init__(
        self,
        database: Database,
        ledger: StoredLedger,
        settings: FeedSettings,
        reader: GroupReader,
        fence: int,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._settings = settings
        self._reader = reader
        self._fence = fence
        self._current: _Current | None = None

    @classmethod
    async def load(
        cls, database: Database, ledger: StoredLedger, settings: FeedSettings, reader: GroupReader
    ) -> Leases:
        """Go on with the lease that is held, and with fencing numbers after the newest that was given out."""
        fence = await database.read(lambda c: statements.newest_fence(c, ledger.model))
        leases = cls(database, ledger, settings, reader, fence)
        if row := await database.read(lambda c: statements.open_lease(c, ledger.model)):
            left = min(row["left_s"], settings.lease_s)
            size = ledger.rule.settings.batch
            lease = Lease(row["id"], row["batch"], size, row["fence"], settings.lease_s)
            leases._current = _Current(lease, row["consumer"], time.monotonic() + left)
        return leases

    def current(self) -> dict[str, Any] | None:
        """Return the current lease: lease_id, batch, fence, consumer, and the seconds that are left (negative: none)."""
        current = self._current
        if current is None or current.lease.batch != self._ledger.rule.next_batch:
            return None
        lease, left = current.lease, current.deadline - time.monotonic()
        lease_values = {"lease_id": lease.lease_id, "batch": lease.batch, "fence": lease.fence}
        return {**lease_values, "consumer": current.consumer, "left_s": round(left, 3)}

    async def lease(self, consumer: str) -> Lease:
        """Lease the next batch. A consumer that repeats the request gets its own lease. Raise Conflict."""
        self._database.check()  # check before a lease is promised
        current, model = self._current, self._ledger.model
        batch = self._ledger.rule.next_batch
        passed = current is not None and current.lease.batch != batch
        if current and not passed and current.consumer != consumer and not current.expired():
            raise Conflict(
                f"batch {current.lease.batch} is leased to {current.consumer!r}: wait until that lease ends, or lease under the"
                " same name",
                code="lease_held",
                param="consumer",
            )
        self._fence += 1
        fence, size = self._fence, self._ledger.rule.settings.batch
        lease = Lease(f"lease-{secrets.token_hex(8)}", batch, size, fence, self._settings.lease_s)
        self._current = _Current(lease, consumer, time.monotonic() + self._settings.lease_s)
        row = {
            "fence": fence,
            "id": lease.lease_id,
            "model": model,
            "batch": batch,
            "consumer": consumer,
            "state": "held",
        }

        def write(connection: Connection) -> None:
            if current and not passed:
                statements.end_lease(
                    connection, model, current.lease.fence, "expired" if current.expired() else "superseded"
                )
            statements.insert_lease(connection, row, lease.deadline_s)

        await self._ledger.apply(Leased(batch), write)
        return lease

    async def groups(self, lease_id: str, fence: int, cursor: int, wait_s: float) -> LeasedGroups:
        """Return the groups of a leased batch after `cursor`; wait up to `wait_s` for one."""
        lease = self._check(lease_id, fence).lease
        until = time.monotonic() + min(wait_s, _MAX_WAIT_S)
        rule, batch = self._ledger.rule, lease.batch
        while len(entries := rule.entries(batch)) <= cursor and not rule.complete(batch):
            left = until - time.monotonic()
            if left <= 0:
                break
            await self._ledger.changed(left)
            self._check(lease_id, fence)
        complete = rule.complete(batch)
        found: tuple[Group, ...] = ()
        if wanted := self._ledger.decision_log.entries(entries[cursor:]):
            await self._database.settled()  # the ledger knows a reward shortly before it is committed
            found = await self._database.read(lambda c: self._reader.read(c, wanted))
        return LeasedGroups(found, len(entries), complete)

    async def renew(self, lease_id: str, fence: int) -> None:
        """Restart the lease's deadline."""
        current, model = self._check(lease_id, fence), self._ledger.model
        lease_s = self._settings.lease_s
        current.deadline = time.monotonic() + lease_s
        await self._database.submit(lambda c: statements.renew_lease(c, model, fence, lease_s))

    async def ack(self, lease_id: str, fence: int, checkpoint: str) -> None:
        """Mark the batch as trained. Raise Conflict if it was not whole."""
        model = self._ledger.model
        try:
            current = self._check(lease_id, fence)
            lease = current.lease
            masked = await self._masked(lease.batch)
            if self._current is not current or self._ledger.rule.next_batch != lease.batch:
                self._check(lease_id, fence)  # it may have ended while we waited
        except (Conflict, NotFound):
            if await self._ended(lease_id, fence, "acked", checkpoint):
                return
            raise

        def write(connection: Connection) -> None:
            statements.end_lease(connection, model, fence, "acked", checkpoint)
            insert_decisions(connection, model, masked)

        try:
            await self._ledger.apply(Consume(lease.batch), write)
        except ValueError as error:
            raise Conflict(str(error), code="batch_not_ready", param="lease_id") from error
        if self._current is current:  # the next batch may be leased already
            self._current = None

    async def _masked(self, batch: int) -> list[Decision]:
        """Return a decision for each reason why tokens of a batch were masked. Reads them here, since all share the writer."""
        if not self._ledger.rule.complete(batch):
            return []  # the next request will be refused
        entries = self._ledger.decision_log.entries(self._ledger.rule.entries(batch))
        await self._database.settled()  # the ledger knows a reward shortly before it is committed
        masks = await self._database.read(lambda c: self._reader.masks(c, entries))
        return [
            Decision("masked", entry.group_id, episode_id, reason, entry.batch, details={"tokens": tokens})
            for entry in entries
            for episode_id in entry.rewarded
            for reason, tokens in sorted(masks[episode_id].items())
        ]

    async def nack(self, lease_id: str, fence: int, reason: str) -> None:
        """Give the batch back untrained. The next lease is of the same batch, or of a later one if a version after it is already
        published."""
        try:
            batch = self._check(lease_id, fence).lease.batch
        except (Conflict, NotFound):
            if await self._ended(lease_id, fence, "nacked"):
                return
            raise
        self._database.check_write()  # check before the lease is forgotten in memory
        self._current, model = None, self._ledger.model

        def write(connection: Connection) -> None:
            statements.end_lease(connection, model, fence, "nacked", reason=reason)

        if self._ledger.rule.version > batch:  # no weights are to come of the batch
            await self._ledger.apply(Returned(batch), write)
        else:
            await self._database.submit(write)

    async def _ended(self, lease_id: str, fence: int, state: str, checkpoint: str = "") -> bool:
        """Return true if a lease was ended, or is being ended, in just this way. Raise Fenced in a process that is no longer the
        coordinator."""
        await self._database.settled()
        row = await self._database.read(lambda c: statements.lease(c, self._ledger.model, lease_id))
        expected = (fence, state, checkpoint)
        return row is not None and (row["fence"], row["state"], row["checkpoint"]) == expected

    def _check(self, lease_id: str, fence: int) -> _Current:
        current, following = self._current, self._ledger.rule.next_batch
        if current is None or current.lease.lease_id != lease_id:
            raise NotFound(f"no lease {lease_id!r} is held; lease again", code="no_lease", param="lease_id")
        if current.lease.fence != fence:
            message = (
                f"fence {fence} is not that of {lease_id}: another trainer has leased since; lease again"
            )
            raise Conflict(message, code="fenced", param="fence")
        if current.lease.batch != following:
            raise NotFound(
                f"{lease_id} has ended: batch {current.lease.batch} was passed over, the next to train is {following}",
                code="no_lease",
                param="lease_id",
            )
        if current.expired():
            message = (
                f"{lease_id} has ended: it was not renewed in time; lease again, which gives the same batch"
            )
            raise Conflict(message, code="lease_expired", param="lease_id")
        return current
