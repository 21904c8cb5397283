"""Rewards of one group: which of them are equal. Pure.

Owns the one definition of equal rewards: the ledger drops groups by it (`[staleness] drop_equal`), the driver orders tasks by it,
and the trainer gives no advantage by it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

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
