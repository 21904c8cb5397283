"""A call is as long as the calls of its task were: their running mean, and of a task that is new the mean of all."""

from __future__ import annotations

from scheduler.lengths.base import Features, Prediction
from scheduler.lengths.memory import Mean, Means, Threshold

_KEEP = 0.97
_KEEP_ALL = 0.999


class History:
    """A ranker by earlier calls of the same task."""

    def __init__(self, tail_share: float, memory: int) -> None:
        """`memory`: tasks that it remembers."""
        self._tasks = Means(memory, _KEEP)
        self._all = Mean()
        self._threshold = Threshold(tail_share)

    def predict(self, features: Features) -> Prediction:
        """Predicts by the task's history; nothing is known of a new task."""
        mean = self._tasks.get(features.task)
        expected = (mean or self._all).value
        return Prediction(expected, self._threshold.above(expected), mean is not None)

    def learn(self, features: Features, length: int) -> None:
        self._tasks.add(features.task, length)
        self._all.add(length, _KEEP_ALL)
