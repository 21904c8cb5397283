"""Running means, thresholds and recall: hand-computed examples, and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.lengths.recall import tail_recall
from scheduler.lengths.running_means import Means, Threshold


def test_older_values_count_less() -> None:
    means = Means(limit=2, keep=0.5)
    means.add("a", 4)
    means.add("a", 1)
    mean = means.get("a")
    assert mean is not None
    assert (mean.count, mean.total, mean.value) == (1.5, 3, 2)


def test_the_keys_that_were_added_to_longest_ago_are_forgotten() -> None:
    means = Means(limit=2, keep=1)
    for key in ("a", "b", "a", "c"):
        means.add(key, 1)
    assert means.get("b") is None
    assert means.get("a") is not None
    assert len(means) == 2


def test_the_threshold_is_of_the_newest_scores() -> None:
    threshold = Threshold(0.2, window=10, least=10)
    assert not any(threshold.above(score) for score in range(10))
    assert not threshold.above(8)  # of 0..9 the top two are 8 and 9; equal is not above
    assert threshold.above(9)
    for _ in range(20):
        threshold.above(100)
    assert not threshold.above(99)


def test_equal_scores_are_no_tails() -> None:
    threshold = Threshold(0.2)
    assert not any(threshold.above(7) for _ in range(2000))


@given(st.lists(st.floats(-1e3, 1e3), min_size=60, max_size=300), st.floats(0.01, 0.9), st.integers(20, 50))
def test_the_threshold_is_that_of_a_sorted_window(scores: list[float], share: float, window: int) -> None:
    threshold = Threshold(share, window, least=20)
    for i, score in enumerate(scores):
        before = sorted(scores[max(i - window, 0) : i])
        high = len(before) >= 20 and score > before[min(int(len(before) * (1 - share)), len(before) - 1)]
        assert threshold.above(score) == high


def test_recall_by_hand() -> None:
    lengths = [10, 9, 1, 1, 1, 1, 1, 1, 1, 1]
    assert tail_recall([5, 4, *[0] * 8], lengths) == 1
    assert tail_recall([5, 0, 4, *[0] * 7], lengths) == pytest.approx(0.5)
    assert tail_recall([0, 0, 5, 4, *[0] * 6], lengths) == 0
    assert tail_recall([0] * 10, lengths) == pytest.approx(0.2)
    # the second place is drawn among nine: the score 4 is in for certain, the true one with 1 / 9
    assert tail_recall([5, 4, *[0] * 8], [10, *[1] * 9]) == pytest.approx((1 + 1 / 9) / 2)
    assert tail_recall([], []) is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.floats(0.05, 0.95))
def test_the_true_order_has_all_and_a_constant_ranking_its_share(lengths: list[int], share: float) -> None:
    distinct = list(range(len(lengths)))
    assert tail_recall(distinct, distinct, share) == pytest.approx(1)
    same, own = tail_recall([0] * len(lengths), lengths, share), tail_recall(lengths, lengths, share)
    assert same is not None
    assert own is not None
    assert 0 < same <= own + 1e-9 <= 1 + 2e-9
