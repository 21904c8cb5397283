"""Figures before the gateway's filters, from its totals, and the totals from its events."""

from __future__ import annotations

from gateway.training_feed.decision_log import DecisionLog
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import Drop, Event, Join, Reward
from scheduler.policies.staleness_state import LedgerSettings
from trainer.loop.episode_counts import GroupTotals


def totals(log: DecisionLog, *events: Event) -> dict[str, object]:
    for event in events:
        log.record(event, RULE.apply(event))
    return log.totals.to_json()


RULE = StaleFlow(LedgerSettings(3, 2, drop_equal=True))


def group(name: str, *rewards: float) -> list[Event]:
    members = [f"{name}{i}" for i in range(len(rewards))]
    joined: list[Event] = [Join(name, member, len(rewards)) for member in members]
    return [*joined, *(Reward(m, r) for m, r in zip(members, rewards, strict=True))]


def test_the_mean_before_filters_is_of_all_groups_that_ended() -> None:
    """Seven groups of equal rewards and two others: true mean 8/9, and the batch's mean is 0.5."""
    log, settled = DecisionLog(), GroupTotals()
    settled.update(totals(log, *group("before", 0.0, 0.0)))
    events = [event for n in range(7) for event in group(f"e{n}", 1.0, 1.0)]
    events += [*group("a", 0.0, 1.0), *group("b", 1.0, 0.0)]
    settled.update(totals(log, *events))
    few = [Join("f", "f0", 2), Join("f", "f1", 2), Drop("f0", "agent_failed"), Drop("f1", "agent_failed")]
    settled.update(totals(log, *few))
    measured = {"equal_reward_groups": 0.0, "groups": 2.0, "reward_mean": 0.5}
    assert settled.figures(measured) == {
        "equal_reward_groups_all": 7 / 9,
        "reward_mean_all": 16 / 18,
        "dropped_groups/too_few_rewards": 1.0,
        "dropped_groups/zero_variance": 7.0,
    }
    assert settled.figures(measured) == {"equal_reward_groups_all": 0.0}, "the next step begins from zero"


def test_the_totals_of_another_ledger_are_not_a_difference() -> None:
    settled = GroupTotals()
    settled.update({"rewards": 9, "reward_sum": 5.0, "groups": {"batch": 4}})
    settled.update({"rewards": 2, "reward_sum": 2.0, "groups": {"batch": 1}})
    settled.update({"rewards": 3, "reward_sum": 2.5, "groups": {"batch": 1, "zero_variance": 1}})
    found = settled.figures({"equal_reward_groups": 0.5, "groups": 2.0})
    assert found["reward_mean_all"] == 0.5
    assert found["equal_reward_groups_all"] == 2 / 3
