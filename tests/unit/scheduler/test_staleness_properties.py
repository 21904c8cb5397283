"""The ledger under random events, held against a model that believes nothing but its commands."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.policies.staleness import (
    AbortEpisode,
    Admit,
    BufferReady,
    CloseGroup,
    Command,
    Consume,
    Consumed,
    Drop,
    Event,
    GroupDropped,
    Join,
    Leased,
    Ledger,
    LedgerSettings,
    MemberDropped,
    Moved,
    Occupied,
    Publish,
    Refuse,
    Reward,
    Skipped,
    event_from_json,
    event_to_json,
)


@dataclass
class Run:
    """A group as its commands tell of it."""

    size: int
    version: int
    reserved: int | None
    occupied: int | None = None
    closed: bool = False
    running: set[str] = field(default_factory=set)
    rewarded: set[str] = field(default_factory=set)
    joined: int = 0


class Model:
    """What the commands add up to, and what each of them must satisfy."""

    def __init__(self, limits: LedgerSettings) -> None:
        self.limits = limits
        self.version = 0
        self.consumed = 0
        self.leased = False
        self.groups: dict[str, Run] = {}
        self.fates: Counter[str] = Counter()
        self.admitted: set[str] = set()

    def held(self, buffer: int) -> int:
        return sum(buffer in (run.reserved, run.occupied) for run in self.groups.values())

    def empty(self, buffer: int) -> bool:
        return self.held(buffer) < self.limits.batch

    def occupants(self, buffer: int) -> int:
        return sum(run.occupied == buffer for run in self.groups.values())

    def open_buffers(self) -> list[int]:
        """Where a new group may go, in order."""
        last = self.version + self.limits.eta
        return [b for b in range(self.version, last + 1) if b >= self.consumed and self.empty(b)]

    def see(self, command: Command) -> None:
        match command:
            case Admit(episode_id, group_id, buffer, version):
                self.see_admit(episode_id, self.groups[group_id], buffer, version)
            case Moved(group_id, source, target):
                run = self.groups[group_id]
                assert run.reserved == source < target <= run.version + self.limits.eta
                run.reserved = target
            case Occupied(group_id, buffer, entry):
                self.see_occupied(self.groups[group_id], buffer, entry)
            case GroupDropped(group_id):
                run = self.groups[group_id]
                assert run.reserved is not None
                run.reserved = None
                self.fates.update(run.running | run.rewarded)
                run.running.clear()
            case MemberDropped(episode_id):
                self.fates[episode_id] += 1
            case BufferReady(buffer):
                assert self.occupants(buffer) == self.limits.batch
            case Consumed(buffer, group_ids):
                self.see_consumed(buffer, group_ids)
            case Skipped(first, until, group_ids):
                assert (first, until) == (self.consumed, self.version)
                lost = {g for g, run in self.groups.items() if run.occupied in range(first, until)}
                assert lost == set(group_ids)
                self.consumed, self.leased = until, False
                self.forget(group_ids)
            case AbortEpisode(episode_id):
                assert self.fates[episode_id] == 1
            case Refuse():
                pytest.fail("a refusal among other commands")

    def see_admit(self, episode_id: str, run: Run, buffer: int, version: int) -> None:
        if run.reserved is None:
            assert buffer == max(self.open_buffers()), "not the latest"
            assert version == self.version
            run.reserved, run.version = buffer, version
        assert (buffer, version) == (run.reserved, run.version)
        run.running.add(episode_id)
        run.joined += 1
        self.admitted.add(episode_id)

    def see_occupied(self, run: Run, buffer: int, entry: int) -> None:
        assert run.reserved is not None
        assert run.version <= buffer <= run.reserved <= run.version + self.limits.eta
        assert buffer >= self.consumed
        assert entry == self.occupants(buffer)
        run.reserved = None
        earlier = range(max(run.version, self.consumed), buffer)
        assert not any(self.empty(b) for b in earlier), "not the earliest"
        run.occupied = buffer
        assert not run.running
        assert len(run.rewarded) >= min(self.limits.min_members, run.size)
        self.fates.update(run.rewarded)

    def see_consumed(self, buffer: int, group_ids: tuple[str, ...]) -> None:
        assert buffer == self.consumed
        assert len(group_ids) == self.limits.batch
        for run in (self.groups[g] for g in group_ids):
            assert run.occupied == buffer
            assert 0 <= buffer - run.version <= self.limits.eta
        self.consumed, self.leased = self.consumed + 1, False
        self.forget(group_ids)

    def forget(self, group_ids: tuple[str, ...]) -> None:
        for group_id in group_ids:
            del self.groups[group_id]


class LedgerMachine(RuleBasedStateMachine):
    @initialize(eta=st.integers(0, 3), batch=st.integers(1, 3), members=st.integers(1, 3))
    def start(self, eta: int, batch: int, members: int) -> None:
        self.limits = LedgerSettings(eta, batch, members)
        self.ledger = Ledger(self.limits)
        self.model = Model(self.limits)
        self.events: list[Event] = []
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def apply(self, event: Event) -> list[Command]:
        before = self.ledger.to_json()
        commands = self.ledger.apply(event)
        if any(isinstance(command, Refuse) for command in commands):
            assert len(commands) == 1
            assert self.ledger.to_json() == before
            return commands
        self.events.append(event)
        if isinstance(event, Leased):
            self.model.leased = True
        for command in commands:
            self.model.see(command)
        return commands

    def running(self) -> list[str]:
        return sorted(e for r in self.model.groups.values() if r.reserved is not None for e in r.running)

    def settle(self, episode_id: str, rewarded: bool) -> None:
        run = next(r for r in self.model.groups.values() if episode_id in r.running)
        run.running.remove(episode_id)
        if rewarded:
            run.rewarded.add(episode_id)
        self.apply(Reward(episode_id) if rewarded else Drop(episode_id, "x"))
        self.check_finished(run)

    def check_finished(self, run: Run) -> None:
        whole = run.closed or run.joined == run.size
        assert (run.reserved is None) == (whole and not run.running)

    @rule(sizes=st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=5))
    def first_joins(self, sizes: list[int]) -> None:
        for size in sizes:
            self.first_join(size)

    def first_join(self, size: int) -> None:
        group_id, episode_id = self.name(), self.name()
        slots = self.model.open_buffers()
        self.model.groups[group_id] = Run(size, self.model.version, None)
        commands = self.apply(Join(group_id, episode_id, size))
        if not slots:
            assert commands == [Refuse(episode_id, "no_slot")]
            del self.model.groups[group_id]

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def later_join(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.model.groups)))
        run = self.model.groups[group_id]
        size = data.draw(st.sampled_from([run.size, run.size, run.size, run.size + 1]))
        missing = run.reserved is not None and run.joined < run.size and not run.closed
        (command,) = self.apply(Join(group_id, self.name(), size))
        assert isinstance(command, Admit) == (missing and size == run.size)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), rewarded=st.sampled_from([True, True, False]), most=st.integers(1, 4))
    def some_settle(self, data: st.DataObject, rewarded: bool, most: int) -> None:
        for episode_id in data.draw(st.permutations(self.running()))[:most]:
            self.settle(episode_id, rewarded)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.model.groups)))
        run = self.model.groups[run_id]
        run.closed = True
        self.apply(CloseGroup(run_id, "x"))
        self.check_finished(run)

    @rule(order=st.sampled_from(["publish first", "consume first", "consume only"]))
    def train(self, order: str) -> None:
        buffer = self.model.consumed
        if self.model.occupants(buffer) < self.limits.batch:
            with pytest.raises(ValueError, match="not ready"):
                self.ledger.apply(Consume(buffer))
            return
        self.apply(Leased(buffer))
        if order == "publish first" and buffer >= self.model.version:
            self.publish(buffer + 1 - self.model.version)
        entries = self.ledger.entries(buffer)
        assert self.apply(Consume(buffer))[0] == Consumed(buffer, entries)
        if order == "consume first" and self.model.version < self.model.consumed:
            self.publish(self.model.consumed - self.model.version)

    @rule(step=st.integers(1, 3), leased=st.booleans(), rarely=st.integers(0, 3))
    def publish_out_of_order(self, step: int, leased: bool, rarely: int) -> None:
        if rarely > 0:
            return
        if leased:
            self.apply(Leased(self.model.consumed))
        first = self.model.consumed
        kept = self.model.leased and self.model.occupants(first) == self.limits.batch
        self.publish(step)
        assert self.model.consumed == (first if kept else max(first, self.model.version))

    def publish(self, step: int) -> None:
        self.model.version += step
        self.apply(Publish(self.model.version))

    @rule(buffer=st.integers(0, 3))
    def impossible(self, buffer: int) -> None:
        before = self.ledger.to_json()
        other = self.model.consumed + buffer + 1
        for event in (Consume(other), Leased(other), Publish(self.model.version), Reward("?")):
            with pytest.raises(ValueError, match=r"\w"):
                self.ledger.apply(event)
        assert self.ledger.to_json() == before

    @invariant()
    def the_model_agrees(self) -> None:
        assert (self.ledger.version, self.ledger.consumed) == (self.model.version, self.model.consumed)
        assert set(self.ledger._group_of) == {e for g in self.ledger.groups() for e in g.members}
        rows = {row.buffer: row for row in self.ledger.buffers()}
        for buffer in range(self.model.consumed, self.model.version + self.limits.eta + 1):
            row = rows[buffer]
            assert row.occupied == self.model.occupants(buffer)
            assert row.occupied + row.reserved == self.model.held(buffer) <= self.limits.batch
            assert (row.state == "READY") == (row.occupied == self.limits.batch)
            assert (row.state == "PENDING") == self.model.empty(buffer)

    @invariant()
    def reservations_are_safe_and_late(self) -> None:
        for run in self.model.groups.values():
            if run.reserved is None:
                continue
            last = run.version + self.limits.eta
            assert max(run.version, self.model.consumed) <= run.reserved <= last
            assert not any(self.model.empty(b) for b in range(run.reserved + 1, last + 1))

    @invariant()
    def a_new_group_can_start_where_one_is_missing(self) -> None:
        """Never stuck: a batch that lacks a group has one underway, or can get one, or waits for a version."""
        buffer = self.model.consumed
        lacking = self.model.occupants(buffer) < self.limits.batch
        reserved = any(run.reserved is not None for run in self.model.groups.values())
        if lacking and not reserved and buffer <= self.model.version + self.limits.eta:
            assert self.ledger.free_slots() > 0
            trial = Ledger.from_json(self.ledger.to_json())
            assert isinstance(trial.apply(Join("trial", "trial", 1))[0], Admit)
            assert Occupied("trial", buffer, self.model.occupants(buffer)) in trial.apply(Reward("trial"))

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for group_id in [g for g, run in self.model.groups.items() if run.reserved is not None]:
            run = self.model.groups[group_id]
            run.closed = True
            self.apply(CloseGroup(group_id, "end"))
        for episode_id in self.running():
            self.settle(episode_id, rewarded=True)
        assert self.model.fates == Counter(self.model.admitted)
        replayed = Ledger(self.limits)
        for value in json.loads(json.dumps([event_to_json(event) for event in self.events])):
            replayed.apply(event_from_json(value))
        assert replayed == self.ledger
        assert Ledger.from_json(json.loads(json.dumps(self.ledger.to_json()))) == self.ledger


LedgerMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
