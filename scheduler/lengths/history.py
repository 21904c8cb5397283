"""Predicts the running mean of the task's earlier calls, and the mean of all calls for a new task."""

from __future__ import annotations

from scheduler.lengths.base import Features, Prediction
from scheduler.lengths.running_means import Mean, Means, Threshold

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
        """Predict from the task's history. `known` is False for a new task."""
        mean = self._tasks.get(features.task)
        expected = (mean or self._all).value
        return Prediction(expected, self._threshold.above(expected), mean is not None)

    def learn(self, features: Features, length: int) -> None:
        self._tasks.add(features.task, length)
        self._all.add(length, _KEEP_ALL)
