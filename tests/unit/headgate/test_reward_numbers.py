"""Values accepted as rewards."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from gateway.config import RewardSettings
from gateway.config.settings import ConfigError, Settings
from headgate.rewards import number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (Fraction(1, 4), 0.25),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
    ],
)
def test_numbers_of_any_library_are_rewards(value: Any, expected: float) -> None:
    found = number(value)
    assert (type(found), found) == (float, expected)


@pytest.mark.parametrize(
    "value",
    [
        True, False, np.True_, np.array(True), "0.5", b"0.5", "nan", None, [1.0], {"reward": 1}, 1j, Decimal("0.5"),
        float("nan"), float("inf"), float("-inf"), np.float32("nan"), 10**400, np.array([0.5, 1.0]),
    ],
)  # fmt: skip
def test_everything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="a reward is "):
        number(value)


def test_the_bounds_are_finite_and_a_range() -> None:
    assert RewardSettings().refusal(1e6) == RewardSettings().refusal(-1e6) == ""
    assert "[rewards] allows -1e+06 to 1e+06" in RewardSettings().refusal(1e308)
    assert RewardSettings().refusal(float("nan"))
    for wrong in ({"min": 2.0, "max": 1.0}, {"max": float("inf")}, {"min": float("nan")}, {"max": 1e300}):
        with pytest.raises(ConfigError, match="rewards"):
            Settings.parse({"models": {"m": {"path": "x"}}, "rewards": wrong})


def test_an_integer_that_python_does_not_print_is_refused_too() -> None:
    with pytest.raises(ValueError, match="thousands of digits"):
        number(10**5000)
