"""The competing rules by traces that were worked out by hand from their sources, and against the formulas of those sources.

A trace is a table of events and of the commands of each. Groups have one member, with the group's name, unless the trace has
more; B, the groups in one batch, is 2.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import rules
from scheduler.policies.staleness_base import DROPPED_KEPT, StalenessRule
from scheduler.policies.staleness_events import (
    AbortEpisode,
    Admit,
    BatchReady,
    CloseGroup,
    Command,
    Consume,
    Consumed,
    Drop,
    Event,
    Finish,
    Grading,
    GroupDropped,
    Join,
    Leased,
    MemberDropped,
    Occupied,
    Publish,
    Refuse,
    Reward,
    Skipped,
)
from scheduler.policies.staleness_state import LedgerSettings
from tests.harness.states import state_of

Trace = list[tuple[Event, list[Command]]]
COMPETITORS = ["synchronous", "one_step", "verl", "areal", "roll"]


def solo(name: str) -> Join:
    return Join(name, name, 1)


def starts(name: str, batch: int, version: int) -> tuple[Event, list[Command]]:
    return solo(name), [Admit(name, name, batch, version)]


def waits(name: str) -> tuple[Event, list[Command]]:
    return solo(name), [Refuse(name, "no_slot")]


def fails(name: str) -> tuple[Event, list[Command]]:
    return Drop(name, "lost"), [MemberDropped(name, "lost"), GroupDropped(name, "too_few_rewards")]


def stale(name: str) -> list[Command]:
    return [GroupDropped(name, "stale"), AbortEpisode(name, "stale")]


def follow(rule: StalenessRule, trace: Trace) -> None:
    for step, (event, expected) in enumerate(trace):
        assert rule.apply(event) == expected, f"step {step}: {event}"


def new(name: str, eta: int, batch: int = 2, min_members: int = 2) -> StalenessRule:
    return rules.create(name, LedgerSettings(eta, batch, min_members))


def test_synchronous() -> None:
    rule = new("synchronous", eta=3)
    follow(
        rule,
        [
            starts("a", 0, 0),
            starts("b", 0, 0),
            waits("c"),
            (Reward("b"), [Occupied("b", 0, 0)]),
            fails("a"),  # its place is free again
            starts("c", 0, 0),
            (Reward("c"), [Occupied("c", 0, 1), BatchReady(0)]),
            waits("d"),  # generated: nothing starts while the trainer works
            (Leased(0), []),
            (Publish(1), []),
            starts("d", 1, 1),
            (Consume(0), [Consumed(0, ("b", "c"))]),
            starts("e", 1, 1),
            waits("f"),
            (Publish(3), [*stale("d"), *stale("e"), Skipped(1, 3, ())]),  # no batch 1 will be trained
            starts("f", 3, 3),
        ],
    )


def test_one_step() -> None:
    rule = new("one_step", eta=3)
    follow(
        rule,
        [
            starts("a", 0, 0),
            starts("b", 0, 0),
            (Reward("a"), [Occupied("a", 0, 0)]),
            waits("c"),  # batch 0 is not generated yet
            (Reward("b"), [Occupied("b", 0, 1), BatchReady(0)]),
            starts("c", 1, 0),
            starts("d", 1, 0),
            waits("e"),
            (Leased(0), []),
            (Reward("d"), []),  # batch 0 is not consumed yet
            (Publish(1), []),
            waits("e"),  # batch 1 is not generated yet
            (Consume(0), [Consumed(0, ("a", "b")), Occupied("d", 1, 0)]),
            (Reward("c"), [Occupied("c", 1, 1), BatchReady(1)]),
            starts("e", 2, 1),
            (Publish(2), [Skipped(1, 2, ("d", "c"))]),  # batch 1 was not leased; e can still be in batch 2
            starts("f", 2, 2),
            waits("g"),
            (Publish(3), [*stale("e"), Skipped(2, 3, ())]),
            (Reward("f"), [Occupied("f", 3, 0)]),
        ],
    )


def test_verl() -> None:
    rule = new("verl", eta=1)  # a window of 2 * (1 + 1) groups
    follow(
        rule,
        [
            starts("a", 0, 0),
            starts("b", 0, 0),
            starts("c", 1, 0),
            starts("d", 1, 0),
            waits("e"),
            (Reward("c"), [Occupied("c", 0, 0)]),  # first finished, first trained
            (Reward("a"), [Occupied("a", 0, 1), BatchReady(0)]),
            waits("e"),  # the counter stays at 4 until the next update
            (Leased(0), []),
            (Publish(1), []),  # the counter is what runs or is queued: b, d
            starts("e", 2, 1),
            starts("f", 2, 1),
            waits("g"),
            (Reward("e"), []),
            (Reward("d"), []),
            (Reward("f"), []),
            (Consume(0), [Consumed(0, ("c", "a")), Occupied("e", 1, 0), Occupied("d", 1, 1), BatchReady(1)]),
            (Leased(1), []),
            (Publish(2), []),
            (Consume(1), [Consumed(1, ("e", "d")), Occupied("f", 2, 0)]),
            (Reward("b"), [Occupied("b", 2, 1), BatchReady(2)]),  # of version 0: older than eta
        ],
    )


def test_areal() -> None:
    rule = new("areal", eta=1)
    follow(
        rule,
        [
            starts("a", 0, 0),
            starts("b", 0, 0),
            starts("c", 1, 0),
            starts("d", 1, 0),
            waits("e"),
            (Reward("c"), []),  # a batch is taken whole
            fails("b"),  # neither accepted nor running: (1 + 0 + 1) * 2 - (1 + 2) = 1
            starts("e", 1, 0),
            waits("f"),
            (Reward("d"), [Occupied("c", 0, 0), Occupied("d", 0, 1), BatchReady(0)]),
            (Leased(0), []),
            (Publish(1), []),  # (1 + 1 + 1) * 2 - (2 + 2) = 2
            starts("f", 2, 1),
            starts("g", 2, 1),
            waits("h"),
            (Reward("g"), []),
            (Reward("f"), []),
            (Reward("a"), []),
            # The order is that of their start, not of their finish.
            (Consume(0), [Consumed(0, ("c", "d")), Occupied("a", 1, 0), Occupied("f", 1, 1), BatchReady(1)]),
            waits("h"),  # (1 + 1 + 1) * 2 - (5 + 1) = 0
        ],
    )


def test_roll() -> None:
    rule = new("roll", eta=1)
    follow(
        rule,
        [
            starts("a", 0, 0),
            starts("b", 0, 0),
            starts("c", 1, 0),
            starts("d", 1, 0),
            waits("e"),
            (Reward("a"), [Occupied("a", 0, 0)]),
            (Reward("b"), [Occupied("b", 0, 1), BatchReady(0)]),
            (Leased(0), []),
            (Publish(1), []),
            starts("e", 2, 1),
            starts("f", 2, 1),
            waits("g"),
            (Reward("e"), []),
            (Consume(0), [Consumed(0, ("a", "b"))]),  # e waits for the older c and d
            (Reward("f"), []),
            (Reward("d"), [Occupied("d", 1, 0)]),  # e waits for c
            (Drop("c", "lost"), [*fails("c")[1], Occupied("e", 1, 1), BatchReady(1)]),
            starts("g", 2, 1),
            waits("h"),
            (Leased(1), []),
            # Batch 3 comes next, and its groups are of steps from 2 on.
            (Publish(3), [GroupDropped("f", "stale"), *stale("g")]),
            (Consume(1), [Consumed(1, ("d", "e")), Skipped(2, 3, ())]),
        ],
    )


@pytest.mark.parametrize(("name", "bounded"), [("areal", False), ("verl", False), ("roll", True)])
def test_a_long_group_is_overtaken_or_waited_for(name: str, bounded: bool) -> None:
    rule = new(name, eta=1)
    rule.apply(solo("long"))
    for number in range(20):
        while rule.free_slots():
            rule.apply(solo(f"{number}-{rule.free_slots()}"))
        for group in rule.groups():
            if group.group_id != "long" and "open" in group.members.values():
                rule.apply(Reward(group.group_id))
        if not rule.complete(rule.next_batch):
            break
        rule.apply(Leased(rule.next_batch))
        rule.apply(Publish(rule.next_batch + 1))
        rule.apply(Consume(rule.next_batch))
    # ROLL: the long group belongs to step 0, and batch 1 cannot go beyond that step while it runs.
    assert rule.next_batch == (1 if bounded else 20)
    commands = rule.apply(Reward("long"))
    assert any(isinstance(command, Occupied) and command.group_id == "long" for command in commands)


@pytest.mark.parametrize("name", COMPETITORS)
def test_members_of_a_group(name: str) -> None:
    rule = new(name, eta=1, batch=1, min_members=2)
    follow(
        rule,
        [
            (Join("g", "x", 3), [Admit("x", "g", 0, 0)]),
            (Join("g", "y", 2), [Refuse("y", "size_differs")]),
            (Join("g", "y", 3), [Admit("y", "g", 0, 0)]),
            (Finish("x"), [Grading("x")]),
            (Finish("x"), [Refuse("x", "episode_finished")]),
            (Reward("y", 1.0), []),
            (Drop("y", "lost"), [Refuse("y", "episode_finished")]),
            (CloseGroup("g", "end"), []),  # x is graded
            (Join("g", "z", 3), [Refuse("z", "group_closed")]),
            (Reward("x", 0.5), [Occupied("g", 0, 0), BatchReady(0)]),
            (Join("g", "z", 3), [Refuse("z", "group_finished")]),
            (Reward("x"), [Refuse("x", "group_finished")]),
            (CloseGroup("g", "end"), []),
        ],
    )
    assert rule.groups()[0].values == {"x": 0.5, "y": 1.0}


def test_a_finished_group_that_waits_cannot_be_changed() -> None:
    rule = new("areal", eta=1)
    follow(rule, [starts("a", 0, 0), (Reward("a"), [])])
    before = state_of(rule)
    follow(
        rule,
        [
            (Reward("a"), [Refuse("a", "episode_finished")]),
            (Join("a", "b", 1), [Refuse("b", "group_full")]),
            (CloseGroup("a", "end"), [Refuse("", "group_finished")]),
        ],
    )
    assert state_of(rule) == before


def test_memory_is_bounded() -> None:
    rule = new("verl", eta=0, batch=1)
    for number in range(DROPPED_KEPT + 10):
        rule.apply(solo(f"d{number}"))
        rule.apply(Drop(f"d{number}", "lost"))
    assert len(rule.groups()) == DROPPED_KEPT
    for number in range(10):
        rule.apply(solo(f"t{number}"))
        rule.apply(Reward(f"t{number}"))
        rule.apply(Leased(number))
        rule.apply(Publish(number + 1))
        rule.apply(Consume(number))
    assert len(rule.groups()) == DROPPED_KEPT
    with pytest.raises(ValueError, match="no episode t0"):
        rule.apply(Reward("t0"))


# The formulas of the sources, with the counters that those keep.


class Counters:
    """The counters of AReaL, verl and ROLL when every batch is trained and published in turn."""

    def __init__(self, eta: int, batch: int) -> None:
        self.eta, self.batch = eta, batch
        self.version = self.accepted = self.running = self.started = self.queued = 0

    def areal(self) -> int:
        return (self.eta + self.version + 1) * self.batch - (self.accepted + self.running)

    def verl(self) -> int:
        return self.batch * (1 + self.eta) - self.started

    def roll(self) -> int:
        return self.eta * self.batch + (self.version + 1) * self.batch - (self.running + self.accepted)

    def start(self) -> None:
        self.running += 1
        self.started += 1

    def finish(self) -> None:
        self.running -= 1
        self.accepted += 1
        self.queued += 1

    def train(self) -> None:
        self.queued -= self.batch
        self.version += 1
        self.started = self.running + self.queued


@pytest.mark.parametrize("name", ["areal", "verl", "roll"])
@settings(max_examples=100, deadline=None)
@given(eta=st.integers(0, 3), batch=st.integers(1, 4), consume_first=st.booleans(), data=st.data())
def test_as_many_start_as_the_source_allows(
    name: str, eta: int, batch: int, consume_first: bool, data: st.DataObject
) -> None:
    rule, counters = new(name, eta, batch), Counters(eta, batch)
    running: list[str] = []
    for number in range(60):
        capacity = {"areal": counters.areal, "verl": counters.verl, "roll": counters.roll}[name]()
        assert rule.free_slots() == max(capacity, 0)
        if rule.complete(rule.next_batch) and data.draw(st.booleans()):
            rule.apply(Leased(rule.next_batch))
            steps: list[Event] = [Publish(rule.next_batch + 1), Consume(rule.next_batch)]
            for step in reversed(steps) if consume_first else steps:
                rule.apply(step)
            counters.train()
        elif capacity > 0 and data.draw(st.booleans()):
            running.append(f"g{number}")
            rule.apply(solo(running[-1]))
            counters.start()
        elif running:
            rule.apply(Reward(running.pop(data.draw(st.integers(0, len(running) - 1)))))
            counters.finish()
