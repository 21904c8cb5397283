"""The error of a ledger without a free slot names the batches and what fills them."""

from __future__ import annotations

from gateway.training_feed.full import no_slot
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import Consume, Finish, Join, Leased, Reward
from scheduler.policies.staleness_state import LedgerSettings


def test_the_batches_their_groups_and_the_trainer_are_named() -> None:
    rule = StaleFlow(LedgerSettings(1, 2))
    for group in "abcd":
        for member in "12":
            rule.apply(Join(group, group + member, 2))
    for member in ("a1", "a2"):
        rule.apply(Reward(member, 1.0))
    rule.apply(Finish("b1"))
    message = no_slot(rule)
    first, trainer, _ = message.split("; ", 2)
    assert first == (
        "no slot is free within the staleness bound: batch 0 has 1 finished group and 1 unfinished group (2 open episodes),"
        " batch 1 has 2 unfinished groups (3 open episodes, 1 being graded)"
    )
    assert trainer == "no trainer has leased batch 0"
    for todo in ("close", "abandon", "gateway staleness", 'mode = "eval"'):
        assert todo in message
    rule.apply(Leased(0))
    assert "; a trainer has batch 0; " in no_slot(rule)


def test_batches_that_were_acknowledged_before_their_versions_are_named() -> None:
    rule = StaleFlow(LedgerSettings(1, 1, min_members=1))
    for batch in range(2):
        rule.apply(Join(f"g{batch}", f"e{batch}", 1))
        rule.apply(Reward(f"e{batch}", 1.0))
        rule.apply(Leased(batch))
        rule.apply(Consume(batch))
    assert rule.free_slots() == 0
    assert no_slot(rule) == (
        "no slot is free within the staleness bound: batch 1 was acknowledged, and the newest live version is 0;"
        " publish version 2 ([staleness] eta = 1)"
    )
