"""A ranker that learns online: ridge regression of the logarithm of a call's length on what `encoding` makes of it.

The normal equations are summed up in batches, older ones fade, and now and then the weights are solved for (LAPACK, through
numpy). That is the model of scikit-learn's Ridge without its import in every gateway process; docs/scheduler.md says what was
measured. Batches may be worked upon elsewhere (`aside`): then the moment from which new weights count depends on how soon that is
done, and what is said is a function of what was shown and of those moments.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from scheduler.lengths.base import Features, Prediction
from scheduler.lengths.encoding import Encoder, Row
from scheduler.lengths.memory import Threshold

Aside = Callable[[Callable[[], None]], Any]
"""Does work that takes some milliseconds, one piece after the other."""

BITS = 9
_BATCH = 64
_SOLVE_EVERY = 8
"""Batches; the first ones are solved at once."""
_KEEP = 0.99
"""What the equations of earlier batches count, after one more."""
_RIDGE = 1.0
_MOST_OPEN = 4096
"""Calls whose rows are kept until they are over; of others what is known then is taken for what was known."""


def at_once(work: Callable[[], None]) -> None:
    """Does work here and now."""
    work()


class Learnt:
    """See `Ranker`."""

    def __init__(self, tail_share: float, memory: int, aside: Aside = at_once, bits: int = BITS) -> None:
        """`memory`: tasks (and groups, and episodes) that it remembers."""
        self._encoder = Encoder(memory, bits)
        self._threshold = Threshold(tail_share)
        self._aside = aside
        self._open: OrderedDict[str, Row] = OrderedDict()
        """Calls that were predicted, as they were seen then: what is learnt is to predict with no more than that."""
        self._rows: list[Row] = []
        self._values: list[float] = []
        self._equations = Equations(self._encoder.width)

    def predict(self, features: Features) -> Prediction:
        """See `Ranker`."""
        row = self._open[features.call] = self._encoder.row(features)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        weights = self._equations.weights
        if weights is None:
            return Prediction()
        score = float(row @ weights)
        expected = math.expm1(min(max(score, 0.7), 20.0))
        most = features.most or math.inf
        return Prediction(min(expected, most), self._threshold.above(score), True)

    def learn(self, features: Features, length: int) -> None:
        """See `Ranker`."""
        row = self._open.pop(features.call, None)
        self._rows.append(self._encoder.row(features) if row is None else row)
        self._values.append(math.log1p(length))
        self._encoder.add(features, length)
        if len(self._rows) == _BATCH:
            self._aside(partial(self._equations.add, self._rows, self._values))
            self._rows, self._values = [], []


class Equations:
    """A ridge regression that is given its rows batch by batch. `weights` may be read from any thread; `add` is for one."""

    def __init__(self, width: int) -> None:
        self._left = np.zeros((width, width))
        self._right = np.zeros(width)
        self._batches = 0
        self.weights: Row | None = None
        """Shape (width,); None before anything was learnt."""

    def add(self, rows: list[Row], values: list[float]) -> None:
        """Fades what came before, adds a batch, and solves if it is time to."""
        some = np.stack(rows)
        self._left *= _KEEP
        self._right *= _KEEP
        self._left += some.T @ some
        self._right += some.T @ np.asarray(values)
        self._batches += 1
        if self._batches <= _SOLVE_EVERY or self._batches % _SOLVE_EVERY == 0:
            ridged = self._left + _RIDGE * np.eye(len(self._right))
            self.weights = np.asarray(np.linalg.solve(ridged, self._right), np.float64)
