"""The test of a version on trial: how often it is wrong, and how soon it finds a poisoned version. Rewards are simulated."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.canary import (
    ALPHA,
    CanaryTest,
    Conversation,
    Decision,
    Mean,
    drawn,
    fell,
    radius,
    reward_range,
)

RUNS = 100


def trial(
    candidate: float, live: float, seed: int, share: float = 0.1, needed: int = 100
) -> tuple[Decision, int]:
    """Return the decision about a version with this mean reward, and its conversations until then. A quarter have no reward."""
    rng, test = random.Random(seed), CanaryTest(needed, 0.0, 1.0)
    while (decision := test.decision) is None:
        arm = "candidate" if rng.random() < share else "live"
        liked = rng.random() < (candidate if arm == "candidate" else live)
        test.add(Conversation(arm, float(liked) if rng.random() < 0.75 else None))
    return decision, test.arms["candidate"].conversations


@pytest.mark.parametrize(("mean", "share"), [(0.5, 0.3), (0.5, 0.5), (0.9, 0.3)])
def test_an_equal_version_is_returned_more_seldom_than_alpha(mean: float, share: float) -> None:
    returned = sum(trial(mean, mean, seed, share, needed=60)[0].outcome == "returned" for seed in range(RUNS))
    assert returned <= ALPHA * RUNS


def test_a_poisoned_version_is_returned_within_a_hundred_conversations() -> None:
    """Users like 0.6 of the live version's replies and 0.1 of the poisoned one's."""
    found = [trial(0.1, 0.6, seed, share=0.25) for seed in range(RUNS)]
    assert {decision.outcome for decision, _ in found} == {"returned"}
    assert max(conversations for _, conversations in found) <= 100


def test_a_better_version_does_not_wait_for_all_its_conversations() -> None:
    decisions = [trial(0.9, 0.3, seed, share=0.25)[0] for seed in range(RUNS)]
    assert {decision.outcome for decision in decisions} == {"promoted"}
    assert all("higher" in decision.why for decision in decisions)


def test_malformed_tool_calls_and_refused_calls_return_a_version() -> None:
    for fault in ("faulty", "refused"):
        test = CanaryTest(1000, 0.0, 1.0)
        for _ in range(60):
            test.add(Conversation("live", 1.0))
            test.add(Conversation("candidate", 1.0, **{fault: True}))
        assert test.decision is not None
        assert test.decision.outcome == "returned"


def test_the_interval_holds_at_all_times_together() -> None:
    """Of the means of fair coins, fewer than alpha ever leave their intervals."""
    left = 0
    for seed in range(RUNS):
        rng, mean = random.Random(seed), Mean()
        for _ in range(200):
            mean.add(float(rng.random() < 0.5))
            low, high = mean.interval(ALPHA)
            if not low <= 0.5 <= high:
                left += 1
                break
    assert left <= ALPHA * RUNS


@given(st.integers(1, 10**6), st.floats(1e-6, 0.5))
def test_more_observations_narrow_the_interval_and_more_certainty_widens_it(count: int, alpha: float) -> None:
    assert radius(count + 1, alpha) < radius(count, alpha) < radius(count, alpha / 2)


def test_the_draw_is_the_share_and_differs_between_versions() -> None:
    names = [f"ep-{n}" for n in range(20_000)]
    first = {name for name in names if drawn(7, name, 0.1)}
    assert 0.09 < len(first) / len(names) < 0.11
    assert first == {name for name in names if drawn(7, name, 0.1)}
    assert len(first & {name for name in names if drawn(8, name, 0.1)}) < len(first) / 2
    assert not any(drawn(7, name, 0.0) for name in names)


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_rewards_have_a_range_of_some_width(history: list[float]) -> None:
    low, high = reward_range(history)
    assert low < high
    assert all(low <= reward <= high for reward in history)


def test_rewards_that_fall_are_found_and_others_are_not() -> None:
    rng = random.Random(1)
    history = [float(rng.random() < 0.8) for _ in range(1000)]
    assert fell(history, [float(rng.random() < 0.3) for _ in range(200)])[2]
    assert not fell(history, [float(rng.random() < 0.8) for _ in range(200)])[2]
