"""The ledger under random events and settings, held against a model that believes nothing but its commands."""

from __future__ import annotations

import copy
import json
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import (
    Admit,
    CloseGroup,
    Command,
    Consume,
    Consumed,
    Drop,
    Event,
    Finish,
    Grading,
    Join,
    Leased,
    Occupied,
    Publish,
    Refuse,
    Reward,
    StuckAction,
    Unstick,
    command_to_json,
    event_from_json,
    event_to_json,
)
from scheduler.policies.staleness_state import LedgerSettings
from tests.harness.states import Snapshot, state_of
from tests.unit.scheduler.policies.staleness_model import LedgerModel, ReservedRun

PLAIN = st.builds(LedgerSettings, st.integers(0, 3), st.integers(1, 3), st.integers(1, 3))
OVERTAKING = st.builds(
    LedgerSettings,
    eta=st.integers(0, 3),
    batch=st.integers(1, 3),
    min_members=st.integers(1, 3),
    spare_members=st.integers(0, 2),
    drop_equal=st.booleans(),
    late_groups=st.just("overtake"),
    stuck_groups=st.integers(1, 3),
)
RACING = st.builds(
    LedgerSettings,
    eta=st.integers(0, 3),
    batch=st.integers(1, 3),
    min_members=st.integers(1, 3),
    spare_groups=st.integers(0, 3),
    spare_members=st.integers(0, 2),
    drop_equal=st.booleans(),
    late_groups=st.sampled_from(["cancel", "drop", "mask", "mask"]),
    stuck_groups=st.integers(1, 3),
)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(limits=st.one_of(PLAIN, OVERTAKING, RACING, RACING, RACING))
    def start(self, limits: LedgerSettings) -> None:
        self.limits = limits
        self.ledger = StaleFlow(limits)
        self.model = LedgerModel(limits)
        self.events: list[Event] = []
        self.names = 0

    @rule(seed=st.integers(0, 2**32), steps=st.integers(4, 12))
    def a_while_passes(self, seed: int, steps: int) -> None:
        """The only rule: of several, hypothesis switches some off for whole runs."""
        rng = Random(seed)
        often = [self.first_joins, self.some_settle, self.some_settle, self.train]
        sometimes = [
            self.later_join,
            self.later_join,
            self.later_join,
            self.finish,
            self.close,
            self.settle_again,
        ]
        seldom = [self.publish_out_of_order, self.unstick, self.the_next_batch_gets_complete, self.impossible]
        for _ in range(steps):
            rng.choice(rng.choices([often, sometimes, seldom], [24, 6, 2])[0])(rng)

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def apply(self, event: Event) -> list[Command]:
        before = Snapshot(self.ledger)
        commands = self.ledger.apply(event)
        for command in commands:
            assert json.dumps(command_to_json(command))
        if any(isinstance(command, Refuse) for command in commands):
            assert len(commands) == 1
            assert before.is_of(self.ledger)
            return commands
        self.events.append(event)
        if isinstance(event, Leased):
            self.model.leased = True
        self.model.see(event, commands)
        self.the_model_agrees()
        self.reservations_are_safe_and_late()
        self.a_new_group_can_start_where_one_is_missing()
        return commands

    def settle(self, event: Reward | Drop) -> None:
        run = self.model.run_of(event.episode_id)
        value = event.value if isinstance(event, Reward) else None
        run.settle(event.episode_id, isinstance(event, Reward), value)
        self.apply(event)
        self.check_finished(run)

    def check_finished(self, run: ReservedRun) -> None:
        assert (run.reserved is None) == self.model.settled(run)

    # Groups

    def first_joins(self, rng: Random) -> None:
        for size in rng.choices([1, 2, 3], [3, 1, 1], k=rng.randint(1, self.ledger.free_slots() + 1)):
            engine = rng.choice([None, self.model.version - rng.randint(-1, 4)])
            group_id = self.first_join(size, engine)
            if rng.random() < 0.7 and group_id in self.model.groups:
                for _ in range(size + self.limits.spare_members - 1):
                    self.next_join(Join(group_id, self.name(), size, engine))

    def first_join(self, size: int, engine: int | None) -> str:
        """A group starts whose first episode an engine of this version would sample: its V is the first that has a slot."""
        model, group_id, episode_id = self.model, self.name(), self.name()
        join = Join(group_id, episode_id, size, engine)
        wanted = model.version if engine is None else max(engine, 0)
        slots = [v for v in range(min(wanted, model.version), model.version + 1) if model.open_batches(v)]
        expected = self.ledger.version_of(join)
        model.groups[group_id] = ReservedRun(size, slots[0] if slots else model.version)
        commands = self.apply(join)
        assert expected == model.groups[group_id].version
        if not slots:
            assert commands == [Refuse(episode_id, "no_slot")]
            del self.model.groups[group_id]
        return group_id

    def later_join(self, rng: Random) -> None:
        if not self.model.groups:
            return
        group_id, run = rng.choice(list(self.model.groups.items()))
        size = rng.choice([run.size, run.size, run.size, run.size + 1])
        missing = run.joined < run.size + self.limits.spare_members
        free = run.reserved is not None and missing and not run.closed
        engine = rng.choice([None, self.model.version - rng.randint(-1, 4)])
        (command,) = self.next_join(Join(group_id, self.name(), size, engine))
        assert isinstance(command, Admit) == (free and size == run.size)

    def next_join(self, join: Join) -> list[Command]:
        """An episode's V is never below its group's, nor above the newest version."""
        assert self.model.groups[join.group_id].version <= self.ledger.version_of(join) <= self.model.version
        return self.apply(join)

    def finish(self, rng: Random) -> None:
        if not self.model.underway():
            return
        episode_id = rng.choice(self.model.underway())
        run = self.model.run_of(episode_id)
        graded = episode_id in run.grading
        expected = Refuse(episode_id, "episode_finished") if graded else Grading(episode_id)
        assert self.apply(Finish(episode_id)) == [expected]

    def some_settle(self, rng: Random) -> None:
        order, drops = (
            rng.sample(self.model.underway(), len(self.model.underway())),
            rng.choice([0.0, 0.05, 0.5]),
        )
        for episode_id in order[: rng.randint(1, 9)]:
            if episode_id in self.model.underway():  # it may have become surplus
                value = rng.choice([None, 0.0, 1.0, 1.0])
                dropped = rng.random() < drops
                self.settle(Drop(episode_id, "x") if dropped else Reward(episode_id, value))

    def settle_again(self, rng: Random) -> None:
        """Settled members, and those that wait for their group's outcome, refuse every further event."""
        known = {e for group in self.ledger.groups() for e in group.members}
        if over := sorted(known - set(self.model.underway())):
            episode_id = rng.choice(over)
            again: list[Event] = [Finish(episode_id), Reward(episode_id), Drop(episode_id, "x")]
            (refusal,) = self.apply(rng.choice(again))
            assert isinstance(refusal, Refuse)
            assert refusal.reason in ("group_finished", "episode_finished")

    def close(self, rng: Random) -> None:
        if self.model.groups:
            self.close_group(rng.choice(list(self.model.groups)))

    def close_group(self, group_id: str) -> None:
        run = self.model.groups[group_id]
        over = run.reserved is None
        run.closed = True
        self.apply(CloseGroup(group_id, "x"))
        assert over or (run.reserved is None) == self.model.settled(run)

    # Batches

    def train(self, rng: Random) -> None:
        order = rng.choice(["publish first", "consume first", "consume first", "consume only"])
        batch = self.model.next_batch
        if not self.model.complete(batch):
            with pytest.raises(ValueError, match="not complete"):
                self.ledger.apply(Consume(batch))
            return
        self.apply(Leased(batch))
        if order == "publish first" and batch >= self.model.version:
            self.publish(batch + 1 - self.model.version)
        entries = self.ledger.entries(batch)
        assert self.apply(Consume(batch))[0] == Consumed(batch, entries)
        if order == "consume first" and self.model.version < self.model.next_batch:
            self.publish(self.model.next_batch - self.model.version)

    def publish_out_of_order(self, rng: Random) -> None:
        if rng.random() < 0.5:
            self.apply(Leased(self.model.next_batch))
        first = self.model.next_batch
        kept = self.model.leased and self.model.complete(first)
        self.publish(rng.randint(1, 3))
        assert self.model.next_batch == (first if kept else max(first, self.model.version))

    def publish(self, step: int) -> None:
        self.model.version += step
        self.apply(Publish(self.model.version))

    def unstick(self, rng: Random) -> None:
        action: StuckAction = rng.choice(["retry", "truncate"])
        batch, expected = self.model.next_batch, self.model.stuck(action)
        commands = self.apply(Unstick(batch, action))
        if not expected:
            assert commands == [Refuse("", "not_stuck")]
            return
        assert not self.model.waiting(batch)
        assert self.model.complete(batch) == (action == "truncate")
        assert self.model.empty(batch) == (action == "retry")

    def impossible(self, rng: Random) -> None:
        before = Snapshot(self.ledger)
        other = self.model.next_batch + rng.randint(1, 4)
        named: list[Event] = [
            Reward("?"),
            Finish("?"),
            Drop("?", "x"),
            CloseGroup("?", "x"),
            Join("?", "?", 0),
        ]
        for event in (
            Consume(other),
            Leased(other),
            Unstick(other, "retry"),
            Publish(self.model.version),
            *named,
        ):
            with pytest.raises(ValueError, match=r"\w"):
                self.ledger.apply(event)
        assert before.is_of(self.ledger)

    def the_model_agrees(self) -> None:
        ledger, model = self.ledger, self.model
        assert (ledger.version, ledger.next_batch) == (model.version, model.next_batch)
        assert set(ledger._group_of) == {e for g in ledger.groups() for e in g.members}
        for action in ("retry", "truncate"):
            assert set(ledger.stuck(action)) == model.stuck(action)
        late = {
            g for g, run in model.groups.items() if run.late and (run.reserved, run.occupied) != (None, None)
        }
        assert {g.group_id for g in ledger.groups() if g.late and g.state != "dropped"} == late
        assert ledger.free_slots() == sum(model.left(b) for b in model.open_batches())
        rows = {row.batch: row for row in ledger.batches()}
        for batch in range(model.next_batch, model.version + self.limits.eta + 1):
            row, left, occupied = rows[batch], model.left(batch), model.occupants(batch)
            assert (row.occupied, row.reserved) == (occupied, len(model.waiting(batch)))
            assert occupied <= self.limits.batch
            assert left >= 0
            whole, others = ("READY_WITH_CAPACITY", "PENDING") if left else ("READY", "STUCK")
            assert row.state == (whole if model.complete(batch) else others)
            assert ledger.complete(batch) == model.complete(batch)

    def reservations_are_safe_and_late(self) -> None:
        model = self.model
        for run in model.groups.values():
            if run.reserved is None:
                continue
            window = model.window(run)
            assert run.reserved in window
            assert not all(model.complete(b) for b in window), "no room"
            if self.limits.late_groups != "overtake":
                assert not any(model.empty(b) for b in range(run.reserved + 1, window.stop))
            if not self.limits.spare_groups:
                assert not model.complete(run.reserved)

    def a_new_group_can_start_where_one_is_missing(self) -> None:
        """Never stuck: a batch that lacks a group has one underway, or can get one, or waits for a version."""
        batch = self.model.next_batch
        reserved = any(run.reserved is not None for run in self.model.groups.values())
        if not self.model.complete(batch) and not reserved and batch <= self.model.version + self.limits.eta:
            assert self.ledger.free_slots() > 0
            trial = copy.deepcopy(self.ledger)
            assert isinstance(trial.apply(Join("trial", "trial", 1))[0], Admit)
            assert Occupied("trial", batch, self.model.occupants(batch)) in trial.apply(Reward("trial"))

    def the_next_batch_gets_complete(self, rng: Random) -> None:
        """Let all engines and graders finish their work in any order, and start groups wherever they may."""
        trial = copy.deepcopy(self.ledger)
        if trial.next_batch > trial.version + self.limits.eta:
            trial.apply(Publish(trial.next_batch))
        batch = trial.next_batch
        todo = [CloseGroup(group.group_id, "end") for group in trial.groups()]
        work: list[Event] = [*todo, *(Reward(e) for e in self.model.underway())]
        rng.shuffle(work)
        for event in work:
            trial.apply(event)
        for i in range(self.limits.batch):
            if trial.complete(batch):
                break
            entry = len(trial.entries(batch))
            assert isinstance(trial.apply(Join(f"new{i}", f"new{i}", 1))[0], Admit)
            assert Occupied(f"new{i}", batch, entry) in trial.apply(Reward(f"new{i}"))
        group_ids = trial.entries(batch)
        assert trial.apply(Consume(batch))[0] == Consumed(batch, group_ids)

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for group_id in [g for g, run in self.model.groups.items() if run.reserved is not None]:
            self.close_group(group_id)
        while left := self.model.underway():
            self.settle(Reward(left[0]))
        assert self.model.fates == Counter(self.model.admitted), "one fate for every episode"
        replayed = StaleFlow(self.limits)
        for value in json.loads(json.dumps([event_to_json(event) for event in self.events])):
            replayed.apply(event_from_json(value))
        assert state_of(replayed) == state_of(self.ledger)


# Without shrinking: it would take minutes, and could not shorten what a seed leads to.
LedgerMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=15,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
TestLedger = LedgerMachine.TestCase


@pytest.mark.long
class TestLedgerAtLength(LedgerMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(LedgerMachine.TestCase.settings, max_examples=400)
