"""Running means by key, and the quantile of the newest scores; both with bounded memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable


class Mean:
    """A running mean in which older values count less."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0.0
        """The sum of the values' weights."""
        self.total = 0.0

    @property
    def value(self) -> float:
        """The mean; 0 before the first value."""
        return self.total / self.count if self.count else 0.0

    def add(self, value: float, keep: float) -> None:
        """Add a value; earlier values keep the share `keep` of their weight."""
        self.count = self.count * keep + 1
        self.total = self.total * keep + value


class Means:
    """A mean for each of the `limit` keys that were updated last."""

    def __init__(self, limit: int, keep: float) -> None:
        self._limit = limit
        self._keep = keep
        self._means: OrderedDict[Hashable, Mean] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def get(self, key: Hashable) -> Mean | None:
        """Return the mean, or None for an unknown key."""
        return self._means.get(key)

    def add(self, key: Hashable, value: float) -> Mean:
        """Add a value under a key. Return the mean."""
        mean = self._means.get(key)
        if mean is None:
            mean = self._means[key] = Mean()
            if len(self._means) > self._limit:
                self._means.popitem(last=False)
        else:
            self._means.move_to_end(key)
        mean.add(value, self._keep)
        return mean


class Threshold:
    """Decides which scores are among the highest `share` of the last `window` scores.

    Scores equal to that quantile are not above it, so of equal scores none is.
    """

    def __init__(self, share: float, window: int = 1000, least: int = 20) -> None:
        """`least`: the number of scores below which none is above the threshold."""
        self._share = share
        self._window = window
        self._least = least
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def above(self, score: float) -> bool:
        """Return True if the score is among the highest of the earlier ones, and add it."""
        count = len(self._ordered)
        is_above = False
        if count >= self._least:
            is_above = score > self._ordered[min(int(count * (1 - self._share)), count - 1)]
        insort(self._ordered, score)
        self._newest.append(score)
        if count == self._window:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        return is_above
