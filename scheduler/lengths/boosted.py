"""A ranker that learns online: boosted trees (LightGBM) over what `encoding` makes of a call.

The newest calls are kept, each as it was seen when it began, and trees are fitted to the logarithms of their lengths now and
then: soon after the first calls, later after every eighth more, at last after every `_EVERY`. A fit takes up to some seconds; it
is made elsewhere (`aside`), and LightGBM does not hold the interpreter meanwhile. The moment from which new trees count depends
on how soon that is done: what is said is a function of what was shown and of those moments. Before the first fit it is what
`history` says. Fits have one thread and a fixed seed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from scheduler.lengths.base import Features, Prediction
from scheduler.lengths.encoding import Encoder, Row
from scheduler.lengths.history import History
from scheduler.lengths.memory import Threshold

Aside = Callable[[Callable[[], None]], Any]
"""Does work that takes long, one piece after the other."""

_FIRST = 64
"""Calls before the first fit, and at least between two."""
_EVERY = 1000
_WINDOW = 8000
"""Calls that are fitted to."""
_MOST_OPEN = 4096
"""Calls whose rows are kept until they are over; of others what is known then is taken for what was known."""
_TREES = 60
_PARAMETERS = {
    "objective": "regression",
    "num_leaves": 15,
    "learning_rate": 0.1,
    "feature_fraction": 0.3,
    "max_bin": 63,
    "num_threads": 1,
    "seed": 0,
    "deterministic": True,
    "force_row_wise": True,
    "verbose": -1,
}


def at_once(work: Callable[[], None]) -> None:
    """Does work here and now."""
    work()


class Boosted:
    """See `Ranker`."""

    def __init__(self, tail_share: float, memory: int, aside: Aside = at_once) -> None:
        """`memory`: tasks (and groups, and episodes) that it remembers. Raises ImportError if LightGBM is not there."""
        self._trees = Trees()
        self._encoder = Encoder(memory)
        self._history = History(tail_share, memory)
        self._threshold = Threshold(tail_share)
        self._aside = aside
        self._open: OrderedDict[str, Row] = OrderedDict()
        """Calls that were predicted, as they were seen then: what is learnt is to predict with no more than that."""
        self._newest: deque[tuple[Row, float]] = deque(maxlen=_WINDOW)
        self._count = 0
        self._due = _FIRST

    def predict(self, features: Features) -> Prediction:
        """See `Ranker`."""
        row = self._open[features.call] = self._encoder.row(features)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        if (score := self._trees.predict(row)) is None:
            return self._history.predict(features)
        expected = math.expm1(min(max(score, 0.7), 20.0))
        return Prediction(min(expected, features.most or math.inf), self._threshold.above(score), True)

    def learn(self, features: Features, length: int) -> None:
        """See `Ranker`."""
        row = self._open.pop(features.call, None)
        self._newest.append((self._encoder.row(features) if row is None else row, math.log1p(length)))
        self._encoder.add(features, length)
        self._history.learn(features, length)
        self._count += 1
        if self._count >= self._due and not self._trees.fitting:
            self._due = self._count + min(max(self._count // 8, _FIRST), _EVERY)
            self._trees.fitting = True
            self._aside(partial(self._trees.fit, tuple(self._newest)))


class Trees:
    """Trees that are fitted anew now and then. `predict` may be called while another thread is in `fit`."""

    def __init__(self) -> None:
        """Raises ImportError if LightGBM is not there."""
        try:
            import lightgbm  # takes a second, and only who has chosen this needs it
        except (ImportError, OSError) as error:  # OSError: the OpenMP library of the system is missing
            raise ImportError(
                f"the ranker `boosted` needs `pip install 'headgate[lengths]'`: {error}"
            ) from error
        self._lightgbm = lightgbm
        self._booster: Any = None
        self.fitting = False
        """A fit was asked for, and is not done."""

    def predict(self, row: Row) -> float | None:
        """None: nothing has been fitted."""
        booster = self._booster
        return None if booster is None else float(booster.predict(row[None], num_threads=1)[0])

    def fit(self, some: Sequence[tuple[Row, float]]) -> None:
        """Fits to rows and their values."""
        try:
            rows, values = np.stack([row for row, _ in some]), np.array([value for _, value in some])
            data = self._lightgbm.Dataset(rows, values)
            self._booster = self._lightgbm.train(_PARAMETERS, data, _TREES)
        finally:
            self.fitting = False
