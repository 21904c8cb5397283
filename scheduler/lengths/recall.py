"""The recall of a ranking: the share of the truly longest calls among those that it put first."""

from __future__ import annotations

import math
from collections.abc import Sequence


def tail_recall(scores: Sequence[float], lengths: Sequence[float], share: float = 0.2) -> float | None:
    """Returns the share of a window's longest calls that are also in the top `share` by score; None without calls. Of
    equal scores at the border each is in with the same probability, so a ranking without information reaches `share`,
    and the true order 1."""
    if not lengths:
        return None
    count = max(math.ceil(round(len(lengths) * share, 9)), 1)
    both = zip(_belongs(scores, count), _belongs(lengths, count), strict=True)
    return sum(chosen * true for chosen, true in both) / count


def _belongs(values: Sequence[float], count: int) -> list[float]:
    """Returns the probability that each is among the `count` highest, if equal ones are drawn by lot."""
    border = sorted(values, reverse=True)[count - 1]
    above, equal = sum(value > border for value in values), sum(value == border for value in values)
    chance = (count - above) / equal
    return [1.0 if value > border else chance if value == border else 0.0 for value in values]
