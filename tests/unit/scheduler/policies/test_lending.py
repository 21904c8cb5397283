"""Lending and recall of nodes, by hand-computed examples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.lending import Lendable, LendingSettings, Lent, Mean, Pace, lend, recall

SETTINGS = LendingSettings(margin_s=1.0, min_stay_s=5.0)
WAITS = Lendable(wait_s=4.0, calls=8, awake=1, wake_s=2.0, sleep_s=0.5)


def test_a_node_is_lent_if_the_wait_is_longer_than_the_switch_and_the_margin() -> None:
    assert lend(WAITS, SETTINGS).yes  # 4 > 2 + 0.5 + 1
    assert not lend(replace(WAITS, wait_s=3.5), SETTINGS).yes
    assert not lend(replace(WAITS, wake_s=2.5), SETTINGS).yes
    assert not lend(replace(WAITS, sleep_s=1.0), SETTINGS).yes
    assert lend(replace(WAITS, wait_s=3.5), replace(SETTINGS, margin_s=0.9)).yes


def test_a_trainer_that_takes_groups_as_they_come_wants_its_node_earlier() -> None:
    trains = replace(WAITS, train_s=8.0)
    for recall_ahead_share, least in (
        (1.0, 11.5),
        (0.5, 7.5),
        (0.0, 3.5),
    ):  # 2 + 0.5 + 1 + recall_ahead_share * 8
        settings = replace(SETTINGS, recall_ahead_share=recall_ahead_share)
        assert not lend(replace(trains, wait_s=least), settings).yes
        assert lend(replace(trains, wait_s=least + 0.1), settings).yes
        lent = Lent(wait_s=least - 2.0, awake=1, sleep_s=0.5, lent_s=60.0, train_s=8.0)
        assert recall(lent, settings).yes
        assert not recall(replace(lent, wait_s=least - 1.9), settings).yes
        assert recall(replace(lent, wait_s=least - 1.9, load_s=0.1), settings).yes
    assert "lead 4.00 s of 8.00 s training" in lend(trains, replace(SETTINGS, recall_ahead_share=0.5)).reason
    assert "training" not in lend(trains, replace(SETTINGS, recall_ahead_share=0.0)).reason


def test_a_node_that_is_not_lent_because_the_wait_is_short_is_its_trainers() -> None:
    short = replace(WAITS, wait_s=3.5)
    assert lend(short, SETTINGS).claimable
    assert lend(replace(short, calls=1), SETTINGS).claimable
    assert lend(replace(short, recalled_s=1.0), SETTINGS).claimable
    assert not lend(replace(WAITS, calls=1), SETTINGS).claimable
    assert not lend(replace(WAITS, recalled_s=1.0), SETTINGS).claimable
    assert not lend(WAITS, SETTINGS).claimable
    assert lend(WAITS, replace(SETTINGS, enabled=False)).claimable


def test_where_no_other_engine_would_fill_the_batch_a_node_is_lent_however_short_the_wait_is() -> None:
    alone = replace(WAITS, wait_s=0.1, awake=0, train_s=100.0)
    assert lend(alone, SETTINGS).yes
    assert not lend(replace(alone, calls=0), SETTINGS).claimable
    whole = lend(replace(alone, wait_s=0.0), SETTINGS)
    assert (whole.yes, whole.claimable) == (False, True)


def test_a_node_is_lent_where_the_wait_is_unknown() -> None:
    assert lend(replace(WAITS, wait_s=math.inf), SETTINGS).yes


def test_without_work_for_one_more_engine_there_is_no_gain() -> None:
    assert not lend(replace(WAITS, calls=1), SETTINGS).yes
    assert lend(replace(WAITS, calls=2), SETTINGS).yes
    assert not lend(replace(WAITS, calls=0, awake=0, wait_s=math.inf), SETTINGS).yes
    assert lend(replace(WAITS, calls=1, awake=0), SETTINGS).yes


def test_what_was_recalled_stays_for_a_while() -> None:
    assert not lend(replace(WAITS, recalled_s=4.9), SETTINGS).yes
    assert lend(replace(WAITS, recalled_s=5.0), SETTINGS).yes


def test_lending_can_be_turned_off() -> None:
    assert not lend(replace(WAITS, wait_s=math.inf), replace(SETTINGS, enabled=False)).yes


def test_the_reason_has_the_figures() -> None:
    reason = lend(WAITS, SETTINGS).reason
    assert all(figure in reason for figure in ("4.0 s", "8 calls", "2.00 s", "0.50 s", "margin 1 s"))
    assert "3.5 s" in lend(replace(WAITS, wait_s=3.5), SETTINGS).reason


def test_a_node_is_recalled_when_what_is_left_is_what_that_takes() -> None:
    lent = Lent(wait_s=1.5, awake=1, sleep_s=0.5, lent_s=60.0)
    assert recall(lent, SETTINGS).yes  # 1.5 <= 0.5 + 1
    assert not recall(replace(lent, wait_s=1.6), SETTINGS).yes
    assert recall(replace(lent, wait_s=1.6, sleep_s=0.6), SETTINGS).yes
    assert not recall(replace(lent, awake=0), SETTINGS).yes
    assert not recall(replace(lent, lent_s=4.9), SETTINGS).yes
    assert recall(replace(lent, lent_s=5.0), SETTINGS).yes


@given(
    e=st.integers(1, 64),
    k=st.integers(1, 64),
    wait_s=st.floats(0.1, 1e4),
    wake_s=st.floats(0, 100),
    sleep_s=st.floats(0, 100),
    margin_s=st.floats(0, 100),
    train_s=st.floats(0, 1000),
    recall_ahead_share=st.floats(0, 1),
    load_s=st.floats(0, 100),
)
def test_the_rule_is_that_of_its_derivation(
    e: int,
    k: int,
    wait_s: float,
    wake_s: float,
    sleep_s: float,
    margin_s: float,
    train_s: float,
    recall_ahead_share: float,
    load_s: float,
) -> None:
    """Lent, k engines do what they can of e * wait_s seconds of work; that is worth it if the batch is whole sooner."""
    lost = wake_s + sleep_s + margin_s + recall_ahead_share * train_s + load_s
    sooner = wait_s - (e * wait_s + k * lost) / (e + k)
    if abs(wait_s - lost) > 1e-6 * max(wait_s, lost):
        state = Lendable(wait_s, 10_000, e, wake_s, sleep_s, train_s=train_s, load_s=load_s)
        verdict = lend(state, replace(SETTINGS, margin_s=margin_s, recall_ahead_share=recall_ahead_share))
        assert verdict.yes == (sooner > 0)
        assert verdict.claimable == (sooner < 0)


def test_the_pace_is_that_of_the_groups() -> None:
    pace = Pace(smooth_s=10.0)
    assert pace.wait_s == math.inf
    for second in range(5):
        pace.update(second, batch=3, groups=2 * second, size=16)
    assert pace.groups_per_s == pytest.approx(2.0)
    assert pace.wait_s == pytest.approx((16 - 8) / 2)


def test_newer_groups_weigh_more() -> None:
    pace = Pace(smooth_s=10.0)
    pace.update(0, 0, 0, 100)
    pace.update(10, 0, 10, 100)  # 1 a second
    pace.update(20, 0, 40, 100)  # 3 a second
    share = 1 - math.exp(-1)
    first, second = share * (1 - share), share
    assert pace.groups_per_s == pytest.approx((first * 1 + second * 3) / (first + second))


def whole_at_2(pace: Pace) -> Pace:
    """Batch 0 of 4 groups is whole after 2 s: 2 groups a second."""
    pace.update(0, 0, 0, 4)
    pace.update(2, 0, 4, 4)
    assert (pace.wait_s, pace.groups_per_s) == (0.0, pytest.approx(2.0))
    return pace


def test_groups_that_come_while_the_trainer_computes_count_for_its_next_batch() -> None:
    pace = whole_at_2(Pace(smooth_s=10.0))
    pace.update(4, 0, 4, 4, ahead=1)  # 1 in 2 s
    pace.update(6, 0, 4, 4, ahead=1)
    pace.update(8, 0, 4, 4, ahead=2)  # 1 in 4 s
    pace.update(10, 1, 2, 4)  # both are in the next batch now
    # by age at 8 s: (2 (e^-.6 - e^-.8) + .5 (e^-.4 - e^-.6) + .25 (1 - e^-.4)) / (1 - e^-.8)
    assert pace.groups_per_s == pytest.approx(0.6213, abs=1e-4)
    assert pace.wait_s == pytest.approx(2 / 0.6213, abs=1e-3)
    pace.update(11, 1, 3, 4)  # 1 in 1 s: what was left of the whole batch's time is not counted
    share = 1 - math.exp(-0.1)
    before, weight = 0.6213 * 0.5507, 0.5507
    expected = (before + share * (1 - before)) / (weight + share * (1 - weight))
    assert pace.groups_per_s == pytest.approx(expected, abs=1e-3)


def test_where_later_batches_are_unknown_their_groups_come_with_the_next_one() -> None:
    pace = whole_at_2(Pace(smooth_s=10.0))
    pace.update(6, 0, 4, 4)
    pace.update(10, 1, 4, 8)  # 4 in 8 s
    # by age at 10 s: (2 (e^-.8 - e^-1) + .5 (1 - e^-.8)) / (1 - e^-1)
    assert pace.groups_per_s == pytest.approx(0.6933, abs=1e-4)
    assert pace.wait_s == pytest.approx(4 / 0.6933, abs=1e-3)


def test_time_in_which_a_batch_was_whole_and_nothing_came_does_not_count() -> None:
    pace = whole_at_2(Pace(smooth_s=10.0))
    pace.update(50, 0, 4, 4)
    pace.update(100, 1, 0, 4)
    assert (pace.groups_per_s, pace.wait_s) == (pytest.approx(2.0), pytest.approx(2.0))
    pace.update(101, 1, 0, 4)  # and now nothing comes although something could
    # by age at 101 s, without the time from 2 to 100: 2 (e^-.1 - e^-.3) / (1 - e^-.3)
    assert pace.groups_per_s == pytest.approx(1.2657, abs=1e-3)


@pytest.mark.parametrize(("groups", "batch"), [(4, 7), (3, 6), (4, 4)])
def test_nothing_is_known_of_groups_between_batches_that_do_not_follow_one_another(
    groups: int, batch: int
) -> None:
    """One was passed over, before or after it was whole."""
    pace = Pace(smooth_s=10.0)
    pace.update(0, 5, 0, 4)
    pace.update(groups / 2, 5, groups, 4)
    pace.update(5, batch, 1, 4)
    assert pace.groups_per_s == pytest.approx(2.0)
    pace.update(6, batch, 2, 4)  # 1 in 1 s
    assert pace.groups_per_s < 2.0


def test_what_comes_at_one_moment_is_not_lost() -> None:
    pace = Pace(smooth_s=10.0)
    pace.update(0, 0, 0, 4)
    pace.update(0, 0, 1, 4)
    pace.update(2, 0, 2, 4)
    assert pace.groups_per_s == pytest.approx(1.0)


def test_groups_that_are_dropped_do_not_make_it_go_backwards() -> None:
    pace = Pace(smooth_s=10.0)
    pace.update(0, 0, 3, 4)
    pace.update(1, 0, 1, 4)
    assert pace.groups_per_s == 0.0
    assert pace.wait_s == math.inf


def test_the_mean_goes_a_share_of_the_way_to_each_value() -> None:
    mean = Mean(share=0.5)
    assert (mean.value, mean.count) == (0.0, 0)
    for seconds in (4.0, 2.0, 6.0):
        mean.measured(seconds)
    assert mean.value == pytest.approx(4.5)
