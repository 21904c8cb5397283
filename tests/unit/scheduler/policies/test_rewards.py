"""Equal rewards: the one definition that the ledger, the driver and the trainer share."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.rewards import all_equal

REWARDS = st.floats(allow_nan=False, allow_infinity=False)


@given(REWARDS, st.lists(st.integers(-40, 40), min_size=1, max_size=6), st.integers(-30, 2))
def test_equal_is_a_spread_within_a_millionth_of_the_size_or_of_1(
    offset: float, steps: list[int], exponent: int
) -> None:
    """Spreads around the bound, against the formula in fractions."""
    width = math.ldexp(max(1.0, abs(offset) / 64), exponent - 20)
    rewards = [reward for step in steps if math.isfinite(reward := offset + step * width)]
    exact = [Fraction(reward) for reward in rewards]
    if len(exact) > 1:
        # The bound itself, which float64 rounds, is not judged.
        spread, bound = max(exact) - min(exact), max(Fraction(1), *map(abs, exact)) / 2**20
        if abs(spread / bound - 1) > Fraction(1, 2**40):
            assert all_equal(rewards) == (spread < bound)
    else:
        assert all_equal(rewards)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([0.0] * 7 + [5.6e-17], True),
        ([0.5, 0.5, 0.5, 0.5000006], True),
        ([0.0, 1e-200], True),
        ([1e6, 1e6 + 1.0], False),
        ([0.0, 1e-5], False),
        ([-1e308, 1e308], False),
        ([math.nan, 1.0, 1.0], False),
        ([1.0, math.nan, 1.0], False),
        ([math.inf, math.inf], False),
    ],
)
def test_rounding_is_equal_and_a_small_difference_is_not(rewards: list[float], equal: bool) -> None:
    assert all_equal(rewards) is equal


def test_sums_of_the_same_float32_terms_in_any_order_are_equal() -> None:
    rng = np.random.default_rng(5)
    for _ in range(40):
        terms = rng.uniform(-1.0, 1.0, 9).astype(np.float32)
        terms /= np.abs(terms).sum()
        orders = itertools.islice(itertools.permutations(terms), 0, 300_000, 9_001)
        sums = [float(np.cumsum(np.array(order, np.float32), dtype=np.float32)[-1]) for order in orders]
        assert all_equal(sums)
