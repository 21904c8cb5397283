"""The figures of an evaluation: the expected values, counted draw by draw."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from headgate.client import EpisodeOutcome
from trainer.config.eval import EvalSettings
from trainer.evaluation.figures import best_of_k, figures, interval, pass_at_k, warnings


def outcomes(*rewards: float | None) -> list[EpisodeOutcome]:
    """Two samples of each task."""
    return [
        EpisodeOutcome("t", "g", "e", reward, error=None if reward is not None else "x", task_number=at // 2)
        for at, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_of_k_samples_with_one_that_passed(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = [any(i < c for i in drawn) for drawn in itertools.combinations(range(n), k)]
        assert pass_at_k(n, c, k) == pytest.approx(statistics.fmean(draws), abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    """The published implementation's product, in logarithms."""
    n, c, k = 1024, 3, 512
    missed = math.exp(sum(math.log1p(-k / i) for i in range(n - c + 1, n + 1)))
    assert pass_at_k(n, c, k) == pytest.approx(1 - missed, rel=1e-12)


@pytest.mark.parametrize(
    "rewards", [[0.5], [0.0, 1.0, 0.5], [-2.0, -1.0, None], [None, None], [1.0, 1.0, 0.25, None, 0.0, -3.0]]
)
def test_best_of_k_is_the_mean_over_all_draws_of_the_best_that_did_not_fail(
    rewards: Sequence[float | None],
) -> None:
    for k in range(1, len(rewards) + 1):
        best = []
        for drawn in itertools.combinations(rewards, k):
            rewarded = [reward for reward in drawn if reward is not None]
            best.append(max(rewarded) if rewarded else 0.0)
        assert best_of_k(rewards, k) == pytest.approx(statistics.fmean(best), abs=1e-12)


def test_the_interval_of_single_samples_is_that_of_independent_ones() -> None:
    rewards = [random.Random(1).random() for _ in range(40)]
    found = interval([[reward] for reward in rewards])
    half = statistics.NormalDist().inv_cdf(0.975) * statistics.stdev(rewards) / math.sqrt(40)
    mean = statistics.fmean(rewards)
    assert found == pytest.approx((mean - half, mean + half), rel=1e-6)


def test_samples_that_repeat_their_task_make_the_interval_no_narrower() -> None:
    once = [[0.0], [1.0], [1.0], [0.25]]
    assert interval([task * 8 for task in once]) == pytest.approx(interval(once))
    separate = interval([[0.0, 1.0]] * 16)
    assert separate == (0.5, 0.5), "every task's mean is the same, so more tasks would change nothing"
    assert interval([[1.0, None], [None, None]]) is None


def test_the_interval_contains_the_true_mean_as_often_as_stated() -> None:
    """Tasks of different difficulty, four samples each: an interval that took samples for independent would hold it less."""
    rng, held = random.Random(7), 0
    for _ in range(1000):
        tasks = [[float(rng.random() < p) for _ in range(4)] for p in (rng.random() for _ in range(60))]
        low, high = interval(tasks) or (1.0, 0.0)
        held += low <= 0.5 <= high
    assert 925 <= held <= 975


def test_failed_episodes_are_counted_and_solve_nothing() -> None:
    found = figures(outcomes(1.0, None, 0.0, 0.5, None, None), EvalSettings(samples=2))
    assert found == {
        "reward_mean": 0.5,
        # Two tasks have rewards, {1} and {0, 0.5}: deviations 0.5 and -0.5, so sqrt((0.25 + 0.25) * 2 / 1) / 3.
        "reward_ci95": [
            pytest.approx(0.5 - 1.959964 / 3, abs=1e-6),
            pytest.approx(0.5 + 1.959964 / 3, abs=1e-6),
        ],
        "reward_mean_failed_as_0": 0.25,
        "pass@1": pytest.approx(1 / 6, abs=1e-6),
        "pass@2": pytest.approx(1 / 3, abs=1e-6),
        "best@1": 0.25,
        "best@2": 0.5,
        "tasks": 3,
        "episodes": 6,
        "rewarded": 3,
        "failed": 3,
    }


def test_a_task_is_solved_from_the_reward_on_that_the_settings_name() -> None:
    four = outcomes(0.5, 0.4, 0.0, 0.6)
    assert figures(four, EvalSettings(samples=2, solved=0.5))["pass@2"] == 1.0
    assert figures(four, EvalSettings(samples=2))["pass@2"] == 0.0


@pytest.mark.parametrize(
    ("values", "ks"), [({}, (1,)), ({"samples": 8}, (1, 2, 4, 8)), ({"samples": 10}, (1, 2, 4, 8, 10))]
)
def test_the_k_that_are_shown(values: dict[str, Any], ks: tuple[int, ...]) -> None:
    assert EvalSettings(**values).ks == ks


def test_nothing_is_warned_of_where_one_version_sampled_every_episode() -> None:
    clean = {
        "failed": 0,
        "episodes": 4,
        "version": 3,
        "versions": {"3": 4},
        "temperature": None,
        "samples": 2,
    }
    assert warnings(clean) == []
    for change, message in (
        ({"versions": {"4": 4}}, "several versions"),
        ({"failed": 1}, "1 of 4 episodes failed"),
        ({"temperature": 0.0}, "greedy samples"),
    ):
        (warning,) = warnings(clean | change)
        assert message in warning


def test_an_outcome_that_is_lost_or_late_moves_no_other_into_another_task() -> None:
    """The first task is solved twice, the second once, the third never; cut by place, one lost sample made it 0.5."""
    two = EvalSettings(samples=2)
    first, second, *rest = outcomes(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    whole = figures([*rest, first, second], two)
    assert (whole["pass@1"], whole["pass@2"], whole["failed"]) == (0.5, 0.666667, 0)
    short = figures([second, *rest], two)
    assert (short["pass@1"], short["pass@2"]) == (0.333333, 0.666667)
    assert (short["tasks"], short["episodes"], short["failed"]) == (3, 6, 1)
