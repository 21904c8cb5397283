"""The feed under requests that arrive twice, late and at the wrong process: an acknowledged batch is consumed, once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from sqlalchemy import Connection, select

from gateway.config import FeedSettings, StalenessSettings
from gateway.store import ledger as statements
from gateway.store.models import LeaseRow
from gateway.training_feed.groups import GroupReader
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import StoredLedger
from headgate.errors import (
    Conflict,
    GatewayError,
    NotFound,
)
from headgate.types import Lease
from scheduler.policies.staleness_events import Join, Publish, Reward
from tests.faults.virtual.stores import Postgres, sqlite_store
from tests.faults.virtual.succession import Coordinator, SuccessionMachine

RULE = StalenessSettings(batch=1, eta=2, min_members=1)
LEASE_S = 10.0


class FeedCoordinator(Coordinator):
    """A coordinator with a ledger and the leases of its batches."""

    ledger: StoredLedger
    leases: Leases

    async def load(self) -> None:
        self.ledger = await StoredLedger.load(self.fenced, RULE, "m")
        reader = GroupReader("m", RULE)
        self.leases = await Leases.load(self.fenced, self.ledger, FeedSettings(lease_s=LEASE_S), reader)


@dataclass
class Request:
    """A trainer's request to a process, perhaps a repeated one."""

    kind: str
    lease: Lease
    checkpoint: str
    task: asyncio.Task[Any] | None = None
    received: bool = False


@dataclass
class Known:
    """What the trainers know."""

    leases: list[Lease] = field(default_factory=list)
    acked: dict[str, str] = field(default_factory=dict)
    """Leases whose ack succeeded, with the checkpoint."""
    refused: set[tuple[str, str]] = field(default_factory=set)
    """Acks that failed, and must never be stored."""


class LeaseMachine(SuccessionMachine[FeedCoordinator]):
    """A coordinator, those that it superseded, and two trainers."""

    make = FeedCoordinator
    kind = "sqlite"

    @initialize()
    def start(self) -> None:
        stack = ExitStack()
        url = stack.enter_context(Postgres.store() if self.kind == "postgresql" else sqlite_store())
        self.begin(stack, url)
        stack.enter_context(patch("gateway.training_feed.leases.time", self.clock))
        self.known, self.requests = Known(), list[Request]()
        self.episodes = self.versions = 0
        self.succeed()

    # What happens to the ledger

    @rule(count=st.integers(1, 3))
    def groups_are_rewarded(self, count: int) -> None:
        self.now.database.at_once = True
        for _ in range(count):
            if self.now.ledger.rule.free_slots():
                self.episodes += 1
                name = f"e{self.episodes}"
                self.loop.run(self.now.ledger.apply(Join(f"g{self.episodes}", name, 1)))
                self.loop.run(self.now.ledger.apply(Reward(name, 1.0)))
        self.now.database.at_once = False

    @rule(step=st.integers(1, 4))
    def a_version_is_published(self, step: int) -> None:
        self.now.database.at_once = True
        self.versions += step
        self.loop.run(self.now.ledger.apply(Publish(self.versions)))
        self.now.database.at_once = False

    # What trainers request

    @rule(consumer=st.sampled_from(["a", "b"]), old=st.booleans(), received=st.booleans())
    def lease(self, consumer: str, old: bool, received: bool) -> None:
        coordinator = self.one(old)

        async def request() -> None:
            lease = await coordinator.leases.lease(consumer)
            if received:
                self.known.leases.append(lease)

        self.send(Request("lease", Lease("", 0, 0, 0, 0.0), "", self.loop.create_task(request())))

    @precondition(lambda self: self.stack and self.known.leases)
    @rule(kind=st.sampled_from(["ack", "ack", "ack", "nack", "renew"]), which=st.integers(0, 3), times=st.integers(1, 2),
          old=st.booleans(), checkpoint=st.sampled_from(["one", "one", "two"]), received=st.booleans())  # fmt: skip
    def response(self, kind: str, which: int, times: int, old: bool, checkpoint: str, received: bool) -> None:
        lease = self.known.leases[-1 - which % len(self.known.leases)]
        for _ in range(times):
            self.send(Request(kind, lease, f"{lease.lease_id}-{checkpoint}", received=received), old=old)

    @precondition(lambda self: self.stack and self.requests)
    @rule(which=st.integers(0, 9))
    def the_same_again(self, which: int) -> None:
        before = self.requests[-1 - which % len(self.requests)]
        if before.kind != "lease":
            self.send(Request(before.kind, before.lease, before.checkpoint, received=True))

    def send(self, request: Request, *, old: bool = False) -> None:
        coordinator = self.one(old)
        if request.task is None:
            request.task = self.loop.create_task(self.execute(request, coordinator))
        self.requests.append(request)
        self.loop.settle()

    async def execute(self, request: Request, coordinator: FeedCoordinator) -> None:
        lease, leases = request.lease, coordinator.leases
        key = (lease.lease_id, request.checkpoint)
        try:
            if request.kind == "ack":
                await leases.ack(lease.lease_id, lease.fence, request.checkpoint)
            elif request.kind == "nack":
                await leases.nack(lease.lease_id, lease.fence, "why not")
            else:
                await leases.renew(lease.lease_id, lease.fence)
        except (Conflict, NotFound) as error:
            if request.kind == "ack" and error.code != "batch_not_ready":
                self.known.refused.add(key)
            return
        if request.kind == "ack" and request.received:
            assert self.known.acked.setdefault(*key) == request.checkpoint
            self.known.acked[lease.lease_id] = request.checkpoint

    # What time does

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)

    # What must hold

    def rows(self) -> list[dict[str, Any]]:
        def read(connection: Connection) -> list[dict[str, Any]]:
            return [dict(row) for row in connection.execute(select(*LeaseRow.__table__.c)).mappings()]

        return self.look(read)

    @invariant()
    def what_is_stored_is_what_was_reported(self) -> None:
        if self.stack is None:
            return
        rows = {row["id"]: row for row in self.rows()}
        events = self.look(lambda c: statements.events(c, "m"))
        consumed = [event["batch"] for event in events if event["type"] == "Consume"]
        acked = [row["batch"] for row in rows.values() if row["state"] == "acked"]
        assert len(set(consumed)) == len(consumed)
        assert sorted(acked) == sorted(consumed)
        assert sum(row["state"] == "held" for row in rows.values()) <= 1, (list(rows.values()), events[-8:])
        for lease_id, checkpoint in self.known.acked.items():
            assert (rows[lease_id]["state"], rows[lease_id]["checkpoint"]) == ("acked", checkpoint)
        for lease_id, checkpoint in self.known.refused:
            row = rows.get(lease_id)
            assert row is None or (row["state"], row["checkpoint"]) != ("acked", checkpoint), "it is stored"
        for lease in self.known.leases:
            assert lease.lease_id in rows

    def teardown(self) -> None:
        if self.stack is None:
            return
        try:
            self.what_is_stored_is_what_was_reported()
            self.training_goes_on()
            for request in self.requests:
                if request.task and request.task.done() and (error := request.task.exception()):
                    assert isinstance(error, GatewayError), repr(error)
        finally:
            self.close()

    def training_goes_on(self) -> None:
        """Commit every write; then a single trainer must get the next batch, and train it."""
        for coordinator in self.coordinators:
            coordinator.database.commit()
            self.loop.settle()
        self.succeed()
        self.advance(LEASE_S + 1.0)
        self.groups_are_rewarded(3)
        self.now.database.at_once = True
        batch = self.now.ledger.rule.next_batch
        lease = self.loop.run(self.now.leases.lease("c"))
        assert lease.batch == batch
        for _ in range(2):
            self.loop.run(self.now.leases.ack(lease.lease_id, lease.fence, "done"))
        assert self.now.ledger.rule.next_batch > batch
        self.what_is_stored_is_what_was_reported()


class PostgresLeaseMachine(LeaseMachine):
    """The same on PostgreSQL."""

    kind = "postgresql"
