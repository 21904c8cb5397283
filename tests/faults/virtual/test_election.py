"""Elections of the coordinator: real transactions, cut into pieces, of processes that crash and stall.

Each process has an event loop and a thread with a connection of its own (`transactions`). PostgreSQL itself reports which
transactions it lets wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import Connection, event

from gateway.cluster.election import Election
from gateway.config import ClusterSettings
from gateway.store import connections, coordination
from gateway.store import ledger as statements
from gateway.store.connections import begin_reading, connect
from headgate.errors import Fenced
from tests.faults.virtual.clock import Clock, VirtualLoop, profile
from tests.faults.virtual.stores import Postgres, sqlite_store
from tests.faults.virtual.transactions import CLOCK, Hand, Killed, MachineClock, Wrote

LEASE_S = 4.0


class Store:
    """The part of `Database` that an election needs; submitted work runs when the machine triggers it."""

    def __init__(self, engine: Any, loop: VirtualLoop, hand: Hand) -> None:
        self.waiting: deque[tuple[Callable[[Connection], Any], Any]] = deque()
        self._engine = engine
        self._loop = loop

    def submit(self, write: Callable[[Connection], Any]) -> Any:
        future = self._loop.create_future()
        self.waiting.append((write, future))
        return future

    async def read(self, query: Callable[[Connection], Any]) -> Any:
        with self._engine.connect() as connection:
            begin_reading(connection)
            return query(connection)


class Member:
    """One process: it looks for its place, holds it, and writes what only the coordinator may write."""

    def __init__(self, machine: ElectionMachine, name: str) -> None:
        self.name, self.machine = name, machine
        self.engine = connect(machine.url, 3)
        if machine.watcher is None:
            event.listen(self.engine, "connect", machine.give_clock)
        self.loop = VirtualLoop(machine.clock)
        self.hand = Hand(self.engine)
        self.store = Store(self.engine, self.loop, self.hand)
        settings = ClusterSettings(lease_s=LEASE_S)
        self.election = Election(self.store, settings, name, f"http://{name}")  # type: ignore[arg-type]
        self.fence: int | None = None
        self.follows: int | None = None
        self.writes = 0
        self.current: Any = None
        self.blocked = self.ended = False
        self.task = self.loop.create_task(self.live())
        self.loop.settle()

    async def live(self) -> None:
        """Lives as `Membership` does."""
        while True:
            found = await self.election.decide()
            if isinstance(found, int):
                self.fence = found
                self.machine.claimed(self, found)
                try:
                    await self.election.hold(found)
                except Fenced:
                    self.ended = True
                    return
            else:
                self.follows = found.fence
                await self.election.changed(found.fence)
                self.follows = None

    def write(self) -> None:
        """Write as the control half does, under the fence that this process believes in."""
        fence, number = self.fence, self.writes
        assert fence is not None
        self.writes += 1

        def write(connection: Connection) -> Wrote:
            coordination.check(connection, fence)
            self.hand.pause()
            value = {"fence": fence, "by": self.name, "number": number}
            statements.insert_event(connection, "m", value, [])
            return Wrote(fence)

        future = self.store.submit(write)
        future.add_done_callback(lambda done: done.exception())

    def idle(self) -> bool:
        """Return true if its thread has nothing to do."""
        return self.current is None and not self.store.waiting


class ElectionMachine(RuleBasedStateMachine):
    """Three processes."""

    kind = "sqlite"
    stack: ExitStack | None = None

    @initialize()
    def start(self) -> None:
        self.stack = ExitStack()
        self.url = self.stack.enter_context(Postgres.store() if self.kind == "postgresql" else sqlite_store())
        self.clock = Clock()
        self.stack.enter_context(patch.object(coordination, "NOW", MachineClock()))
        self.stack.enter_context(patch.object(connections, "_IDLE_S", 3600))  # transactions are stopped
        self.stack.enter_context(patch("gateway.cluster.election.time", self.clock))
        self.watcher: Any = None
        if self.kind == "postgresql":
            self.watcher = psycopg.connect(self.url, autocommit=True)
            self.stack.callback(self.watcher.close)
            self.watcher.execute(CLOCK)
            self.set_time()
        self.eyes = connect(self.url, 2)
        self.stack.callback(self.eyes.dispose)
        self.names = 0
        self.fences: list[int] = []
        self.newest = 0
        self.members: list[Member] = []
        for _ in range(3):
            self.a_process_starts()

    def set_time(self) -> None:
        """Set the database's clock to the machine's."""
        if self.watcher is not None:
            self.watcher.execute("UPDATE machine_clock SET now = %s", [self.clock.now])

    def give_clock(self, connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA synchronous=OFF")
        connection.create_function("machine_clock", 0, lambda: self.clock.now)

    def waits(self, pid: int) -> bool:
        if self.watcher is None:
            return False
        return bool(self.watcher.execute("SELECT cardinality(pg_blocking_pids(%s))", [pid]).fetchone()[0])

    def claimed(self, member: Member, fence: int) -> None:
        assert fence not in self.fences, "a fence has two holders"
        self.fences.append(fence)

    # Steps

    def step(self, member: Member) -> None:
        """One piece of a member's transaction."""
        before = self.row()
        if member.current is None:
            if not member.store.waiting or (self.watcher is None and self.busy()):
                return  # SQLite has one writer at a time, and lets the others wait where they begin
            write, member.current = member.store.waiting.popleft()
            member.hand.begin(write)
        if member.blocked:
            return
        member.blocked = True
        member.hand._go.release()
        self.look(before)

    def look(self, before: tuple[int, float] | None) -> None:
        """Let every process reach a pause or its end; the end of one may free others."""
        again = True
        while again:
            again = False
            for member in self.members:
                if member.blocked and member.hand.look(self.waits):
                    member.blocked = False
                    if member.hand.done:
                        self.over(member, before)
                        again = True

    def over(self, member: Member, before: tuple[int, float] | None) -> None:
        future, member.current = member.current, None
        hand, now = member.hand, self.row()
        if now is not None and before is not None:
            assert now[0] >= before[0], "a fence went back"
            if now[0] > before[0]:
                assert before[1] <= self.clock.now, "another process followed before the end of the lease"
        self.newest = max(self.newest, now[0] if now else 0)
        if isinstance(hand.error, Killed):
            return
        assert hand.error is None or isinstance(hand.error, Fenced), repr(hand.error)
        if isinstance(hand.result, Wrote) and hand.error is None:
            assert now is not None and now[0] == hand.result, "one that was superseded has written"
        if future.done():  # its caller has left
            return
        if hand.error is not None:
            future.set_exception(hand.error)
        else:
            future.set_result(hand.result)
        member.loop.settle()

    def busy(self) -> bool:
        return any(m.current is not None for m in self.members)

    def row(self) -> tuple[int, float] | None:
        query = "SELECT fence, deadline FROM coordinator"
        if self.watcher is not None:  # in one message: it is read before and after every piece
            found = self.watcher.execute(query).fetchone()
        else:
            with self.eyes.connect() as connection:
                found = connection.exec_driver_sql(query).first()
        return (found[0], found[1]) if found else None

    # Rules

    def member(self, which: int) -> Member:
        return self.members[which % len(self.members)]

    @rule(which=st.integers(0, 2), steps=st.integers(1, 6))
    def go_on(self, which: int, steps: int) -> None:
        for _ in range(steps):
            self.step(self.member(which))

    @rule(who=st.sets(st.integers(0, 2), min_size=1), seconds=st.sampled_from([0.3, 0.7, 1.5, 4.5]))
    def time_passes(self, who: set[int], seconds: float) -> None:
        """Advance the clock; processes that are not in `who` stall, and notice later."""
        parts = 4
        for _ in range(parts):
            self.clock.now += seconds / parts
            self.set_time()
            for which in sorted(who):
                self.member(which).loop.settle()

    @rule(which=st.integers(0, 2))
    def write(self, which: int) -> None:
        member = self.member(which)
        if member.fence is not None and not member.ended and len(member.store.waiting) < 3:
            member.write()

    @rule(steps=st.integers(1, 3), others=st.integers(1, 8))
    def the_holder_stands_still(self, steps: int, others: int) -> None:
        """Stop the holder in the middle of a write, for longer than its lease; another process may take over."""
        self.finish()
        row = self.row()
        holders = [at for at, m in enumerate(self.members) if row and m.fence == row[0] and not m.ended]
        if not holders:
            return
        holder = holders[0]
        self.member(holder).write()
        self.go_on(holder, steps)
        for _ in range(others):
            self.time_passes({0, 1, 2} - {holder}, 1.5)
            for at in {0, 1, 2} - {holder}:
                self.go_on(at, 4)
        self.go_on(holder, 4)

    @rule(which=st.integers(0, 2))
    def resign(self, which: int) -> None:
        member = self.member(which)
        if member.fence is not None and not member.ended:
            member.task.cancel()
            member.loop.create_task(member.election.resign(member.fence))
            member.ended = True
            member.loop.settle()

    @rule(which=st.integers(0, 2))
    def crash(self, which: int) -> None:
        self.end(self.member(which))
        self.a_process_starts()

    def end(self, member: Member) -> None:
        before = self.row()
        if member.current is not None:
            if member.blocked:  # the database continues it until it notices
                self.watcher.execute("SELECT pg_terminate_backend(%s)", [member.hand.pid])
                member.hand._killed = True
                while not member.hand.done:
                    member.hand._stopped.acquire(timeout=0.01)
                    member.hand._go.release()
            else:
                member.hand.kill(self.waits)
                while not member.hand.done:
                    member.hand._stopped.acquire(timeout=0.01)
            member.current, member.blocked = None, False
        self.members.remove(member)
        member.loop.end()
        member.engine.dispose()
        self.look(before)

    def a_process_starts(self) -> None:
        self.names += 1
        self.members.append(Member(self, f"p{self.names}"))

    @invariant()
    def what_is_written_was_allowed(self) -> None:
        """Fences only grow along what was committed: no superseded process wrote after its successor."""
        if self.stack is None:
            return
        with self.eyes.connect() as connection:
            fences = [value["fence"] for value in statements.events(connection, "m")]
        assert fences == sorted(fences), fences
        for member in self.members:
            if member.task.done() and not member.task.cancelled():
                assert member.task.exception() is None, repr(member.task.exception())

    def teardown(self) -> None:
        if self.stack is None:
            return
        try:
            self.what_is_written_was_allowed()
            self.a_process_coordinates()
            self.what_is_written_was_allowed()
        finally:
            for member in list(self.members):
                self.end(member)
            self.stack.close()

    def a_process_coordinates(self) -> None:
        """While processes live, one of them coordinates and may write, and the others know it."""
        for member in [m for m in self.members if m.ended]:
            while not member.idle():
                self.finish()
            self.end(member)
            self.a_process_starts()
        for _ in range(60):
            self.time_passes({0, 1, 2}, 0.3)
            self.finish()
        row = self.row()
        assert row is not None and row[1] > self.clock.now, "no process coordinates"
        leaders = [m for m in self.members if m.fence == row[0] and not m.ended]
        assert len(leaders) == 1
        leaders[0].write()
        self.finish()
        with self.eyes.connect() as connection:
            assert statements.events(connection, "m")[-1]["fence"] == row[0]
        assert all(m.follows == row[0] for m in self.members if m is not leaders[0] and not m.ended)

    def finish(self) -> None:
        """Run every transaction to its end."""
        for _ in range(200):
            if all(member.idle() for member in self.members):
                return
            for member in list(self.members):
                self.step(member)
        raise AssertionError("the transactions hold one another up")


class PostgresElectionMachine(ElectionMachine):
    """The same on PostgreSQL, whose transactions run concurrently."""

    kind = "postgresql"


@pytest.fixture(scope="module", autouse=True)
def _postgres() -> Iterator[None]:
    with Postgres.running():
        yield


TestElection = ElectionMachine.TestCase
TestElection.settings = profile(25, 40)
TestElectionOnPostgres = PostgresElectionMachine.TestCase
TestElectionOnPostgres.settings = profile(10, 40)
