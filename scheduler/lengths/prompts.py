"""Predicts the length of a call from its prompt alone, by a regression on a few columns that needs few calls.

Calls of one task have the same prompt and similar lengths, so the calls of a task share the weight of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_RIDGE = 1.0
"""The penalty of a coefficient, in tasks."""

Vector = NDArray[np.float64]


class Prompts:
    """Ridge regression. `predict` may be called while another thread is in `fit`."""

    def __init__(self) -> None:
        self._fitted: tuple[Vector, Vector, float] | None = None
        """The means of the columns, their coefficients, and the mean of the values."""

    def predict(self, columns: Vector) -> float | None:
        """Return the logarithm of a length, or None before the first fit."""
        if (fitted := self._fitted) is None:
            return None
        means, coefficients, mean = fitted
        return float((columns - means) @ coefficients + mean)

    def fit(self, columns: Vector, values: Vector, tasks: Sequence[str]) -> None:
        """Fit to calls: columns (calls, width), values (calls,), and the task of each call."""
        calls = Counter(tasks)
        weights = np.array([1 / calls[task] for task in tasks])
        means, mean = np.average(columns, 0, weights), float(np.average(values, 0, weights))
        centered = columns - means
        weighted = centered * weights[:, None]
        square = weighted.T @ centered + _RIDGE * np.eye(columns.shape[1])
        self._fitted = means, np.linalg.solve(square, weighted.T @ (values - mean)), mean
