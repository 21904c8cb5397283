"""The recall of a ranking: the share of the longest calls that it ranks first."""

from __future__ import annotations

import math
from collections.abc import Sequence


def tail_recall(scores: Sequence[float], lengths: Sequence[float], share: float = 0.2) -> float | None:
    """Return the share of the longest calls that are also in the top `share` by score, or None without calls.

    Equal scores at the border count with equal probability, so a ranking without information has `share`, the true order 1.
    """
    if not lengths:
        return None
    count = max(math.ceil(round(len(lengths) * share, 9)), 1)
    both = zip(_belongs(scores, count), _belongs(lengths, count), strict=True)
    return sum(chosen * true for chosen, true in both) / count


def _belongs(values: Sequence[float], count: int) -> list[float]:
    """Return for each value the probability that it is among the `count` highest, equal ones in random order."""
    border = sorted(values, reverse=True)[count - 1]
    above, equal = sum(value > border for value in values), sum(value == border for value in values)
    chance = (count - above) / equal
    return [1.0 if value > border else chance if value == border else 0.0 for value in values]
