"""Rewards of one group. Pure."""

from __future__ import annotations

from collections.abc import Collection

ROUNDING = 1e-6
"""Rewards that differ by at most this share of the largest one are equal but for rounding: sums of float32 are no more exact."""


def all_equal(rewards: Collection[float], tolerance: float = ROUNDING) -> bool:
    """Returns whether rewards are equal, but for `tolerance` times the largest absolute value. True for none or one."""
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= tolerance * max(abs(low), abs(high))
