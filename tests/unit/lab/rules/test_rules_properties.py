"""Every competing rule under random events, held against a model that believes nothing but its commands."""

from __future__ import annotations

import copy
import json
from collections import Counter
from unittest import TestCase

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lab import rules
from scheduler.policies.staleness_base import StalenessRule
from scheduler.policies.staleness_events import (
    Admit,
    CloseGroup,
    Command,
    Consume,
    Drop,
    Event,
    Finish,
    Join,
    Leased,
    Publish,
    Refuse,
    Returned,
    Reward,
    Unstick,
    event_from_json,
    event_to_json,
)
from scheduler.policies.staleness_state import LedgerSettings
from tests.harness.states import Snapshot, state_of
from tests.unit.scheduler.policies.staleness_model import QueueModel, Run


class RuleMachine(RuleBasedStateMachine):
    name = ""

    @initialize(eta=st.integers(0, 3), batch=st.integers(1, 3), members=st.integers(1, 3))
    def start(self, eta: int, batch: int, members: int) -> None:
        self.limits = LedgerSettings(eta, batch, members)
        self.rule = rules.create(self.name, self.limits)
        self.model = QueueModel(self.name, self.limits)
        self.events: list[Event] = []
        self.names = 0

    def new_name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def apply(self, event: Event) -> list[Command]:
        before = Snapshot(self.rule)
        commands = self.rule.apply(event)
        if any(isinstance(command, Refuse) for command in commands):
            assert len(commands) == 1
            assert before.is_of(self.rule)
            return commands
        self.events.append(event)
        if isinstance(event, Leased | Returned):
            self.model.leased = isinstance(event, Leased)
        self.model.see(event, commands)
        return commands

    def pending(self) -> list[str]:
        return sorted(g for g, run in self.model.groups.items() if run.pending())

    def settle(self, episode_id: str, rewarded: bool) -> None:
        self.model.run_of(episode_id).settle(episode_id, rewarded)
        self.apply(Reward(episode_id, 1.0) if rewarded else Drop(episode_id, "x"))

    @rule(sizes=st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=5))
    def first_joins(self, sizes: list[int]) -> None:
        for size in sizes:
            group_id, episode_id = self.new_name(), self.new_name()
            free = self.rule.free_slots()
            self.model.groups[group_id] = Run(size, self.model.version)
            commands = self.apply(Join(group_id, episode_id, size))
            if free == 0:
                assert commands == [Refuse(episode_id, "no_slot")]
                del self.model.groups[group_id]
            else:
                assert isinstance(commands[0], Admit)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def later_join(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.model.groups)))
        run = self.model.groups[group_id]
        size = data.draw(st.sampled_from([run.size, run.size, run.size, run.size + 1]))
        missing = run.pending() and run.joined < run.size and not run.closed
        (command,) = self.apply(Join(group_id, self.new_name(), size))
        assert isinstance(command, Admit) == (missing and size == run.size)

    @precondition(lambda self: self.model.underway())
    @rule(data=st.data(), rewarded=st.sampled_from([True, True, True, False]), most=st.integers(1, 4))
    def some_settle(self, data: st.DataObject, rewarded: bool, most: int) -> None:
        for episode_id in data.draw(st.permutations(self.model.underway()))[:most]:
            if episode_id in self.model.underway():
                self.settle(episode_id, rewarded)

    @precondition(lambda self: self.model.underway())
    @rule(data=st.data())
    def grade(self, data: st.DataObject) -> None:
        self.apply(Finish(data.draw(st.sampled_from(self.model.underway()))))

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(self.pending()))
        self.model.groups[group_id].closed = True
        self.apply(CloseGroup(group_id, "x"))

    @rule(order=st.sampled_from(["publish first", "consume first", "consume only"]))
    def train(self, order: str) -> None:
        batch = self.model.next_batch
        if not self.model.complete(self.model.next_batch):
            with pytest.raises(ValueError, match="not complete"):
                self.rule.apply(Consume(batch))
            return
        self.apply(Leased(batch))
        if order == "publish first" and batch >= self.model.version:
            self.publish(batch + 1)
        self.apply(Consume(batch))
        if order == "consume first" and self.model.version <= batch:
            self.publish(batch + 1)

    @rule(step=st.integers(1, 3), leased=st.booleans(), rarely=st.integers(0, 3))
    def publish_out_of_order(self, step: int, leased: bool, rarely: int) -> None:
        if rarely > 0:
            return
        if leased:
            self.apply(Leased(self.model.next_batch))
        first, kept = (
            self.model.next_batch,
            self.model.leased and self.model.complete(self.model.next_batch),
        )
        self.publish(self.model.version + step)
        assert self.model.next_batch == (first if kept else max(first, self.model.version))

    @rule()
    def give_back(self) -> None:
        self.apply(Returned(self.model.next_batch))
        assert self.model.next_batch >= self.model.version

    def publish(self, version: int) -> None:
        self.model.version = version
        self.apply(Publish(version))

    @rule(ahead=st.integers(1, 3))
    def impossible(self, ahead: int) -> None:
        before = Snapshot(self.rule)
        other = self.model.next_batch + ahead
        known = next(iter(self.model.underway()), "?")
        for event in (
            Consume(other),
            Leased(other),
            Returned(other),
            Publish(self.model.version),
            Reward("?"),
            Reward(known, float("nan")),
            CloseGroup("?", "x"),
            Join("?", "?", 0),
            Join("new", known, 1) if known != "?" else Drop("?", "x"),
            Unstick(self.model.next_batch, "retry"),
        ):
            with pytest.raises(ValueError, match=r"\w"):
                self.rule.apply(event)
        assert before.is_of(self.rule)

    @invariant()
    def the_model_agrees(self) -> None:
        here, model = self.rule, self.model
        assert (here.version, here.next_batch) == (model.version, model.next_batch)
        assert list(here.entries(model.next_batch)) == model.entries
        assert here.complete(model.next_batch) == model.complete(model.next_batch)
        assert not here.entries(model.next_batch + 1)
        assert not here.complete(model.next_batch + 1)
        known = {group.group_id: group for group in here.groups()}
        assert {g for g, group in known.items() if group.state == "reserved"} == set(self.pending())
        rows = here.batches()
        assert (rows[0].batch, rows[0].occupied) == (model.next_batch, len(model.entries))
        assert sum(row.reserved for row in rows) == len(self.pending())
        assert all(row.occupied + row.reserved <= self.limits.batch for row in rows)

    @rule(consume_first=st.booleans())
    def three_more_batches_could_be_trained(self, consume_first: bool) -> None:
        """No deadlock: if all that runs ends well and the trainer works, batches follow."""
        trial = copy.deepcopy(self.rule)
        for _ in range(3):
            generate(trial)
            assert trial.complete(trial.next_batch)
            train(trial, consume_first)

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for group_id in self.pending():
            self.model.groups[group_id].closed = True
            self.apply(CloseGroup(group_id, "end"))
        while running := self.model.underway():
            self.settle(running[0], rewarded=True)
        # Groups that wait to be trained have no fate yet: go on until none is left, with groups that come after them.
        for _ in range(10):
            if not self.pending():
                break
            self.drain()
        assert not self.pending()
        assert self.model.fates == Counter(self.model.admitted)
        replayed = rules.create(self.name, self.limits)
        for value in json.loads(json.dumps([event_to_json(event) for event in self.events])):
            replayed.apply(event_from_json(value))
        assert state_of(replayed) == state_of(self.rule)

    def drain(self) -> None:
        """Fills batch `next_batch` and trains it."""
        batch = self.model.next_batch
        if self.model.version < batch:
            self.publish(batch)
        while not self.model.complete(self.model.next_batch) and self.rule.free_slots():
            self.first_joins([1])
            for episode_id in self.model.underway():
                self.settle(episode_id, rewarded=True)
        assert self.model.complete(self.model.next_batch)
        self.train("publish first")


def generate(trial: StalenessRule) -> None:
    """Ends all that runs and starts what may start, until batch `next_batch` is complete or nothing happens any more."""
    if trial.version < trial.next_batch:
        trial.apply(Publish(trial.next_batch))
    for number in range(8 * trial.settings.batch * (trial.settings.eta + 2)):
        if trial.complete(trial.next_batch):
            return
        if trial.free_slots():
            name = f"trial-{trial.next_batch}-{number}"
            assert isinstance(trial.apply(Join(name, name, 1))[0], Admit)
        for group in trial.groups():
            if group.state == "reserved":
                trial.apply(CloseGroup(group.group_id, "trial"))
                for episode_id in group.running():
                    trial.apply(Reward(episode_id))


def train(trial: StalenessRule, consume_first: bool) -> None:
    batch = trial.next_batch
    trial.apply(Leased(batch))
    steps: list[Event] = [Publish(max(batch, trial.version) + 1), Consume(batch)]
    for step in reversed(steps) if consume_first else steps:
        trial.apply(step)


def machine(rule_name: str) -> type[TestCase]:
    """The test case of one rule."""

    class Machine(RuleMachine):
        name = rule_name

    case: type[TestCase] = Machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)  # type: ignore[attr-defined]
    return case


TestSynchronous = machine("synchronous")
TestOneStep = machine("one_step")
TestVerl = machine("verl")
TestAreal = machine("areal")
TestRoll = machine("roll")
