"""Predicts the length of a call from its prompt alone, by a regression on a few columns that is good after few calls.

Calls of one task have the same prompt and nearly the same length, so a task counts once: its calls share the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_RIDGE = 1.0
"""A coefficient is drawn to 0 as by one task that says so."""

Vector = NDArray[np.float64]


class Prompts:
    """Ridge regression. `predict` may be called while another thread is in `fit`."""

    def __init__(self) -> None:
        self._fitted: tuple[Vector, Vector, float] | None = None
        """The means of the columns, their coefficients, and the mean of the values."""

    def predict(self, columns: Vector) -> float | None:
        """The logarithm of a length; None: nothing has been fitted."""
        if (fitted := self._fitted) is None:
            return None
        means, coefficients, mean = fitted
        return float((columns - means) @ coefficients + mean)

    def fit(self, columns: Vector, values: Vector, tasks: Sequence[str]) -> None:
        """Fits to calls: shapes (calls, width) and (calls,), and the task of each."""
        calls = Counter(tasks)
        weights = np.array([1 / calls[task] for task in tasks])
        means, mean = np.average(columns, 0, weights), float(np.average(values, 0, weights))
        beside = columns - means
        weighted = beside * weights[:, None]
        square = weighted.T @ beside + _RIDGE * np.eye(columns.shape[1])
        self._fitted = means, np.linalg.solve(square, weighted.T @ (values - mean)), mean
