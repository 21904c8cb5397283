"""Episodes and their ledger under requests that arrive twice, late and at another process: memory equals the store."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from sqlalchemy import Connection, select

from gateway.config.settings import Settings
from gateway.episodes.episodes import Episodes
from gateway.grading.grading import Grading
from gateway.store import ledger as statements
from gateway.store.models import EpisodeRow, LedgerEventRow
from gateway.store.sampled import Sampled
from gateway.training_feed.ledger import EQUALITY, StoredLedger
from headgate.errors import (
    Conflict,
    GatewayError,
    Unavailable,
)
from headgate.keys import key_of
from headgate.types import EpisodeOpened, EpisodeRequest
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import Consume, Publish, event_from_json
from scheduler.policies.staleness_state import LedgerSettings
from tests.faults.virtual.stores import sqlite_store
from tests.faults.virtual.succession import Coordinator, SuccessionMachine
from tests.harness.states import state_of

SETTINGS = Settings.parse(
    {
        "models": {"m": {"path": "nowhere"}},
        "staleness": {"batch": 2, "eta": 1, "min_members": 1, "spare_groups": 1, "spare_members": 1},
        "episodes": {"idle_s": 50, "total_s": 500},
    }
)
RULE = SETTINGS.staleness_of("m")
LIMITS = {
    *("eta", "batch", "min_members", "spare_groups", "spare_members", "drop_equal", "late", "stuck_groups"),
}


def replayed(connection: Connection) -> Any:
    """Return a pure rule that has applied the committed events."""
    pure = StaleFlow(LedgerSettings(**RULE.model_dump(include=LIMITS), **EQUALITY))
    for value in statements.events(connection, "m")[1:]:
        pure.apply(event_from_json(value))
    return pure


class EpisodesCoordinator(Coordinator):
    """A coordinator with a ledger and the open episodes."""

    ledger: StoredLedger
    episodes: Episodes
    engine: int | None = None
    """The version of the engine that would sample a new call; None: the newest version."""

    async def load(self) -> None:
        self.ledger = await StoredLedger.load(self.fenced, RULE, "m")
        grading = await Grading.open({}, self.fenced, {})
        self.episodes = Episodes(
            SETTINGS, self.fenced, {"m": self.ledger}, [], grading, engine_version=lambda _model: self.engine
        )
        await self.episodes.load()


class LedgerMachine(SuccessionMachine[EpisodesCoordinator]):
    """A driver of groups of two, a trainer, and coordinators in succession."""

    make = EpisodesCoordinator

    @initialize()
    def start(self) -> None:
        stack = ExitStack()
        self.begin(stack, stack.enter_context(sqlite_store()))
        for module in ("episodes", "admission"):
            stack.enter_context(patch(f"gateway.episodes.{module}.time", self.clock))
        stack.enter_context(patch("gateway.episodes.closing.sampled", lambda *_: Sampled(1)))
        self.requested: list[tuple[str, str]] = []
        self.opened: dict[str, EpisodeOpened] = {}
        """The first response by idempotency key."""
        self.rewarded: dict[str, str] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.succeed()

    def send(self, work: Any, coordinator: EpisodesCoordinator | None = None) -> None:
        """Send a request to a coordinator, the present one by default; check with `refused` if it fails."""
        receiver = coordinator or self.now

        async def request() -> None:
            try:
                await work
            except GatewayError as error:
                self.refused(receiver, error)

        self.tasks.append(self.loop.create_task(request()))
        self.loop.settle()

    def refused(self, receiver: EpisodesCoordinator, error: GatewayError) -> None:
        """Require that only a superseded process refuses, except for what has ended and a group without a place."""
        if isinstance(error, Conflict):
            closed = {row.id for row in self.rows() if row.state == "closed"}
            ended = error.code == "episode_closed" and any(episode in str(error) for episode in closed)
            assert ended or error.code in ("episode_grading", "group_finished", "group_closed"), repr(error)
        elif isinstance(error, Unavailable):
            assert receiver is not self.now or self.named > len(self.coordinators), repr(error)
        else:
            assert error.code == "no_slot", repr(error)

    # What engines do

    @rule(behind=st.sampled_from([None, 0, 1, 2, 3]))
    def an_engine_lags(self, behind: int | None) -> None:
        """Or it is ahead of the ledger for a moment."""
        self.now.engine = None if behind is None else self.now.ledger.rule.version + 1 - behind

    # What drivers request

    @rule(new=st.booleans(), which=st.integers(0, 5), times=st.integers(1, 2), old=st.booleans(), received=st.booleans(),
          wait_s=st.sampled_from([0.0, 5.0]))  # fmt: skip
    def open(self, new: bool, which: int, times: int, old: bool, received: bool, wait_s: float) -> None:
        if new or not self.requested:
            number = len(self.requested)
            self.requested.append((f"idempotency-{number:04d}", f"g{number // 2}"))
        key, group = self.requested[-1 - which % len(self.requested)]
        for _ in range(times):
            coordinator = self.one(old)
            self.send(self.opening(coordinator, key, group, received=received, wait_s=wait_s), coordinator)

    async def opening(
        self, coordinator: EpisodesCoordinator, key: str, group: str, *, received: bool, wait_s: float
    ) -> None:
        opened = await coordinator.episodes.open_once(
            key_of("admin", key), EpisodeRequest("t", group, 2, "train", "m"), wait_s
        )
        if (pure := coordinator.ledger.rule)._groups.get(group) is not None:
            assert pure._groups[group].version <= opened.version, "older than its group"
        # A superseded coordinator may return the stored response of its successor, which knows a later version.
        assert opened.version <= self.now.ledger.rule.version
        if received:
            assert self.opened.setdefault(key, opened) == opened, "another episode"

    @precondition(lambda self: self.stack and self.opened)
    @rule(
        which=st.integers(0, 9),
        reward=st.sampled_from([0.0, 1.0]),
        times=st.integers(1, 2),
        old=st.booleans(),
    )
    def reward(self, which: int, reward: float, times: int, old: bool) -> None:
        episode = sorted(o.episode_id for o in self.opened.values())[which % len(self.opened)]
        for _ in range(times):
            coordinator = self.one(old)
            self.send(self.rewarding(coordinator, episode, reward), coordinator)

    async def rewarding(self, coordinator: EpisodesCoordinator, episode: str, reward: float) -> None:
        result = await coordinator.episodes.reward(episode, reward, None, final=True)
        assert result is not None
        self.rewarded[episode] = result.reason

    @precondition(lambda self: self.stack and self.opened)
    @rule(which=st.integers(0, 9), old=st.booleans())
    def abandon(self, which: int, old: bool) -> None:
        episode = sorted(o.episode_id for o in self.opened.values())[which % len(self.opened)]
        coordinator = self.one(old)
        self.send(coordinator.episodes.abandon(episode, "lost"), coordinator)

    # What trainers do

    @rule()
    def train(self) -> None:
        """Consume a complete batch."""
        pure = self.now.ledger.rule
        if pure.complete(pure.next_batch):
            self.send(self.now.ledger.apply(Consume(pure.next_batch)))

    @rule(step=st.integers(1, 2))
    def publish(self, step: int) -> None:
        self.send(self.now.ledger.apply(Publish(self.now.ledger.rule.version + step)))

    # What time does

    @rule(seconds=st.sampled_from([1.0, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.advance(seconds)
        self.send(self.now.episodes.sweep())

    # What must hold

    def commands(self) -> list[dict[str, Any]]:
        stored = self.look(
            lambda c: list(c.scalars(select(LedgerEventRow.commands).order_by(LedgerEventRow.seq)))
        )
        return [command for some in stored for command in some]

    def rows(self) -> list[Any]:
        return self.look(lambda c: list(c.execute(select(EpisodeRow.__table__))))

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        if self.stack is None:
            return
        trained = [g for c in self.commands() if c["type"] == "Consumed" for g in c["group_ids"]]
        assert len(set(trained)) == len(trained)
        rows = {row.id: row for row in self.rows()}
        assert len({row.key_hash for row in rows.values()}) == len(rows)
        assert all(opened.episode_id in rows for opened in self.opened.values())
        for episode, reason in self.rewarded.items():
            assert (rows[episode].state, rows[episode].reason) == ("closed", reason)
        for task in self.tasks:
            if task.done() and not task.cancelled():
                assert task.exception() is None, repr(task.exception())

    def memory_is_what_is_stored(self) -> None:
        """With no write pending, the ledger equals a pure rule that was fed the committed events."""
        assert state_of(self.look(replayed)) == state_of(self.now.ledger.rule)
        stored = {row.id for row in self.rows() if row.state == "open"}
        assert stored == {live.id for live in self.now.episodes.live()}

    def a_group_goes_through(self) -> None:
        """Once nothing is open, a new group is admitted and rewarded."""
        while (pure := self.now.ledger.rule).complete(pure.next_batch):
            self.train()
            self.settle()
        self.publish(2)
        self.settle()
        before = set(self.opened)
        for number in range(2):
            key = f"idempotency-last-{number}"
            self.send(self.opening(self.now, key, "last", received=True, wait_s=0.0))
        self.settle()
        added = sorted(set(self.opened) - before)
        assert len(added) == 2, "a group of two was not admitted, though nothing is open"
        for key in added:
            self.send(self.rewarding(self.now, self.opened[key].episode_id, 1.0))
        self.settle()
        assert [self.rewarded.get(self.opened[key].episode_id) for key in added] == ["rewarded"] * 2

    def settle(self) -> None:
        for _ in range(20):
            self.now.database.commit()
            self.loop.settle()

    def teardown(self) -> None:
        if self.stack is None:
            return
        try:
            self.nothing_is_trained_twice()
            self.settle()
            self.memory_is_what_is_stored()
            self.succeed()
            self.memory_is_what_is_stored()
            for _ in range(3):  # an episode without a client loses its place
                self.time_passes(600.0)
                self.settle()
            assert not [row for row in self.rows() if row.state != "closed"]
            self.memory_is_what_is_stored()
            self.a_group_goes_through()
            self.nothing_is_trained_twice()
        finally:
            self.close()
