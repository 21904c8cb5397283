"""Rewards: which values are one, and which of a group are equal. Pure.

Owns the one definition of equal rewards: the ledger drops groups by it (`[staleness] drop_equal`), the driver orders tasks by it,
and the trainer gives no advantage by it. It imports the standard library alone: grading workers start with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

ROUNDING = 2.0**-20
"""Rewards that differ by at most this share of their size are equal.

Two float32 sums of the same 9 terms, each in an order of its own, are at most 8 * 2**-24 of the terms' summed sizes off (Higham,
"Accuracy and Stability of Numerical Algorithms", section 4.2), so they differ by at most 2**-20 of that.
"""
SIZE = 1.0
"""The size of rewards is their largest absolute value, and at least this: a reward near 0 may be the sum of terms of size 1, as
0.1 + 0.2 - 0.3 = 5.6e-17 is, and has their rounding."""


def all_equal(rewards: Collection[float], tolerance: float = ROUNDING, size: float = SIZE) -> bool:
    """Return whether rewards differ by at most `tolerance` times their largest absolute value, which counts as at least `size`.

    True for none or one; False if one of several is not finite.
    """
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    if not all(map(math.isfinite, rewards)):
        return False
    return high - low <= tolerance * max(size, abs(low), abs(high))


def number(value: Any) -> float:
    """Return a finite number that an agent or a grader stated, as a float. Raise ValueError.

    Scalars of NumPy and PyTorch are numbers. Truth values and text are not, even where Python would turn them into numbers:
    `true` states that something happened, not how well.
    """
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise ValueError(f"a reward is a number, not {_short_repr(plain)}")
    try:
        found = float(plain)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"a reward is a finite number, not {_short_repr(plain)}")
    return found


def _plain(value: Any) -> Any:
    """Return the number in a scalar of an array library; anything else as it is. Raise ValueError for several numbers."""
    if not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except Exception as error:  # an array of several values; each library raises its own error
        raise ValueError(f"a reward is one number, not {_short_repr(value)}") from error


def _short_repr(value: Any) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"
