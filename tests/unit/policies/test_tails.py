"""StreamRL's division of engines: some computed by hand, and properties of every one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.tails import Division, Expected, divide, engine_s, tail_count
from scheduler.policies.throughput import EngineModel

UNIT = EngineModel(k1=0, k2=1, k3=0, k4=0)
"""A step takes a second, whatever runs."""


def some(*tokens: float) -> list[Expected]:
    return [Expected(n) for n in tokens]


CALLS = st.lists(st.floats(1, 1e5), min_size=0, max_size=40).map(lambda tokens: some(*tokens))
MODELS = st.builds(
    EngineModel, k1=st.floats(0, 1e-5), k2=st.floats(1e-3, 1e-1), k3=st.floats(0, 1e-2), k4=st.floats(0, 1e-2)
)


def test_an_engine_lasts_a_step_for_every_token_of_every_wave() -> None:
    assert engine_s(4, 10, 0, UNIT, slots=4) == 10
    assert engine_s(5, 10, 0, UNIT, slots=4) == 20
    assert engine_s(0, 10, 0, UNIT, slots=4) == 0


def test_a_step_counts_the_batch_and_what_it_has_in_the_cache() -> None:
    model = EngineModel(k1=0.5, k2=1, k3=2, k4=3)
    # batch 2: max(1, 2 * 2) + 3, and 0.5 for each of 2 * (6 + 8 / 2) tokens: 17 s a step, 8 steps, 2 waves
    assert engine_s(4, 8, 6, model, slots=2) == 17 * 8 * 2


def test_the_quickest_division_by_hand() -> None:
    """Ten calls, two of them tails; P90 is 100, P50 is 10; two at once in an engine, three engines.

    1 + 2: tails ceil(2/2) = 1 wave of 100; rest 4 an engine, 2 waves of 10: max 100.
    2 + 1: tails 1 wave of 100; rest 8, 4 waves of 10: max 100. None: 4 an engine, 2 waves of 100: 200.
    """
    found = divide(some(100, 100, *[10] * 8), 3, UNIT, slots=2)
    assert found == Division(tails=1, rest=2, tails_s=100, rest_s=20)
    assert found.seconds == 100


def test_percentiles_are_of_the_nearest_rank() -> None:
    """The nearest-rank P90 of the lengths 1 to 1000 is 900; all calls run at once."""
    assert divide(some(*range(1, 1001)), 2, UNIT, slots=1000).seconds == 900


def test_tails_get_as_many_engines_as_they_need() -> None:
    """Four tails, P90 100, P50 1. 1 + 2: two waves of 100. 2 + 1: one wave of 100, 8 waves of 1. None: 4 waves of 100."""
    assert divide(some(*[100] * 4, *[1] * 16), 3, UNIT, slots=2) == Division(2, 1, 100, 8)


def test_groups_run_beside_one_another_so_the_greater_time_counts_and_not_the_sum() -> None:
    """One at once. 1 + 3: tails 2 * 12 = 24, rest ceil(8/3) * 10 = 30: sum 54, max 30.

    2 + 2: tails 12, rest 40: sum 52, max 40. 3 + 1: tails 12, rest 80. The sum would take 2 + 2.
    """
    found = divide(some(12, 12, *[10] * 8), 4, UNIT, slots=1)
    assert (found.tails, found.tails_s, found.rest_s) == (1, 24, 30)


def test_engines_are_not_divided_where_that_would_be_slower() -> None:
    """Two engines, one at once, all equal: 5 waves undivided; 1 + 1 would be 8 for the rest."""
    assert divide(some(*[10] * 10), 2, UNIT, slots=1) == Division(0, 2, 50, 50)


@pytest.mark.parametrize(
    ("calls", "alpha", "count"),
    [(0, 0.2, 0), (1, 0.2, 0), (2, 0.2, 1), (5, 0.2, 1), (6, 0.2, 2), (10, 0, 0), (2, 0.99, 1)],
)
def test_how_many_are_tails(calls: int, alpha: float, count: int) -> None:
    assert tail_count(calls, alpha) == count


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="engines"):
        divide([], 0, UNIT, slots=1)
    with pytest.raises(ValueError, match="slots"):
        divide([], 1, UNIT, slots=0)
    with pytest.raises(ValueError, match="alpha"):
        divide([], 1, UNIT, slots=1, alpha=1)


@given(CALLS, st.integers(1, 9), MODELS, st.integers(1, 16), st.floats(0, 0.9))
def test_what_holds_of_every_division(
    calls: list[Expected], n: int, model: EngineModel, slots: int, alpha: float
) -> None:
    division = divide(calls, n, model, slots, alpha)
    undivided = divide(calls, n, model, slots, alpha=0)
    assert undivided.tails == 0
    assert division.seconds <= undivided.seconds
    assert division.tails + division.rest == n
    assert division.rest >= 1


@given(CALLS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_order_in_which_calls_are_given_says_nothing(
    calls: list[Expected], n: int, random: object
) -> None:
    shuffled = list(calls)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert divide(calls, n, UNIT, 4) == divide(shuffled, n, UNIT, 4)
