"""Expected lengths of calls: a ranker of a stated recall, and the lengths that were sampled so far.

What the ranker knows is `Sample.predicted`: how hard a task is compared with others, through a noise with which it finds 0.87 of
the truly longest fifth of the prompts (`workload.RANKER_NOISE`; StreamRL's figure). headgate's `boosted` reached 0.878 on
held-out seeds of repeated tasks, and 0.770 on new tasks (lab/notes). It cannot run here: prompts have no words. The lengths in
tokens are learned online, from the calls that have ended.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class Foresight:
    """Length prediction for one run."""

    def __init__(self, window: int = 1000, least: int = 20) -> None:
        self._window, self._least = window, least
        self._newest: deque[int] = deque()
        self._ordered: list[int] = []

    def expect(self, rank: float) -> int:
        """Return the expected tokens of a call of this rank (0 to 1, the longest); 0 while unknown."""
        count = len(self._ordered)
        if count < self._least:
            return 0
        return self._ordered[min(int(rank * count), count - 1)]

    def learn(self, tokens: int) -> None:
        """Record the length of a call that has ended."""
        insort(self._ordered, tokens)
        self._newest.append(tokens)
        if len(self._newest) > self._window:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
