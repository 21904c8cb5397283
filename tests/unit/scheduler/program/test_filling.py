"""The fill of the next batch, from a ledger."""

from __future__ import annotations

import pytest

from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import Consume, Join, Leased, Publish, Reward, Unstick
from scheduler.policies.staleness_state import LedgerSettings
from scheduler.program.node_state import Batches
from scheduler.program.nodes import Filling


def test_a_batch_fills_is_whole_and_another_one_comes() -> None:
    rule = StaleFlow(LedgerSettings(eta=1, batch=2, min_members=1))
    assert Filling.of("m", rule, 3) == Filling("m", 0, 0, 2, 3)
    for group in "abc":
        rule.apply(Join(group, group, 1))
    for count, group in enumerate("abc", 1):
        rule.apply(Reward(group, 1.0))
        assert Filling.of("m", rule, 0) == Filling("m", 0, min(count, 2), 2, 0, max(count - 2, 0))
    for event in (Leased(0), Publish(1), Consume(0)):
        rule.apply(event)
    assert Filling.of("m", rule, 0) == Filling("m", 1, 1, 2, 0)


def test_a_batch_that_was_truncated_is_whole() -> None:
    rule = StaleFlow(LedgerSettings(eta=0, batch=2, min_members=1))
    for group in "ab":
        rule.apply(Join(group, group, 1))
    rule.apply(Reward("a", 1.0))
    assert Filling.of("m", rule, 0) == Filling("m", 0, 1, 2, 0)
    rule.apply(Unstick(0, "truncate"))
    assert Filling.of("m", rule, 0) == Filling("m", 0, 1, 1, 0)


def test_groups_of_the_next_batch_count_when_they_come() -> None:
    """At 4 s, by age, as nothing came since: (2 (e^-.2 - e^-.4) + 1 (1 - e^-.2)) / (1 - e^-.4) groups per second."""
    batches = Batches(smooth_s=10.0)
    for now_s, filling in (
        (0, Filling("m", 0, 0, 4, 9)),
        (2, Filling("m", 0, 4, 4, 9)),
        (4, Filling("m", 0, 4, 4, 9, ahead=2)),
        (10, Filling("m", 1, 2, 4, 9)),
    ):
        batches.filled(now_s, filling)
    assert batches.wait_s("m") == pytest.approx(2 / 1.4502, abs=1e-3)
