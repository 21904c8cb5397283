"""A ranker that learns online: a regression that needs few calls, and boosted trees (LightGBM) that need many.

The newest calls are kept as they were encoded when they started (`encoding`). Both models are fitted to the logarithms of their
lengths: first after `_FIRST` calls, then whenever the calls have grown by an eighth, at last after every `_EVERY`. The regression
predicts from the prompt; the histories of the call's task, turn, group and episode correct that. The trees have all features, and
their weight grows with the calls that they were fitted to. Before the first fit the predictions are those of `history`.

A fit takes up to some seconds and runs where `run` has it; LightGBM releases the GIL. Predictions are a function of the calls
and of the moments at which fits end. Fits have one thread and a fixed seed.
"""

from __future__ import annotations

import ctypes
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from headgate.extras import install_command
from scheduler.lengths.base import Features, Prediction
from scheduler.lengths.encoding import Encoded, Encoder, Row
from scheduler.lengths.history import History
from scheduler.lengths.prompts import Prompts
from scheduler.lengths.running_means import Threshold

Run = Callable[[Callable[[], None]], Any]
"""Runs long work, one piece after the other."""

_OPENMP = "libgomp.so.1"
_FIRST = 32
"""Calls before the first fit, and the least between two."""
_EVERY = 1000
_WINDOW = 8000
"""Calls of a fit."""
_MOST_OPEN = 4096
"""Running calls whose encoding is kept; others are encoded when they end."""
_HALF = 4000
"""The number of fitted calls at which the trees count half."""
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


def _import_lightgbm() -> Any:
    """Import LightGBM, which takes a second. Raise ImportError."""
    try:
        _load_openmp()
        import lightgbm
    except (ImportError, OSError) as error:
        raise ImportError(f"the ranker `boosted` needs `{install_command('lengths')}`: {error}") from error
    return lightgbm


def _load_openmp() -> None:
    """Load the OpenMP library that LightGBM needs: the system's, else the one in torch's package (torch is not imported)."""
    if _loads(_OPENMP):
        return
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        _loads(str(Path(folder) / "lib" / _OPENMP))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def run_inline(work: Callable[[], None]) -> None:
    """Run work in this thread."""
    work()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call, as it was encoded when it started, and the expectation then."""

    encoded: Encoded
    expected: float
    """The logarithm of its length, without the trees."""
    row: Row
    """The input of the trees."""


class Boosted:
    """A ranker of gradient-boosted trees."""

    def __init__(self, tail_share: float, memory: int, run: Run = run_inline) -> None:
        """`memory`: tasks (and groups, and episodes) that it remembers. Raise ImportError without LightGBM."""
        self._models = Models()
        self._encoder = Encoder(memory)
        self._history = History(tail_share, memory)
        self._threshold = Threshold(tail_share)
        self._run = run
        self._open: OrderedDict[str, Call] = OrderedDict()
        """Running calls: models learn from what was known when a call was predicted."""
        self._newest: deque[tuple[Call, float]] = deque(maxlen=_WINDOW)
        self._count = 0
        self._due = _FIRST

    def predict(self, features: Features) -> Prediction:
        call = self._open[features.call] = self._models.call(self._encoder.encode(features))
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        if (score := self._models.predict(call)) is None:
            return self._history.predict(features)
        expected = math.expm1(min(max(score, 0.7), 20.0))
        return Prediction(min(expected, features.most or math.inf), self._threshold.above(score), True)

    def learn(self, features: Features, length: int) -> None:
        call = self._open.pop(features.call, None) or self._models.call(self._encoder.encode(features))
        self._newest.append((call, math.log1p(length)))
        self._encoder.add(features, length)
        self._history.learn(features, length)
        self._count += 1
        if self._count >= self._due and not self._models.fitting:
            self._due = self._count + min(max(self._count // 8, _FIRST), _EVERY)
            self._models.fitting = True
            self._run(partial(self._models.fit, tuple(self._newest)))


class Models:
    """The fitted models. `call` and `predict` may run while another thread is in `fit`."""

    def __init__(self) -> None:
        """Raise ImportError without LightGBM."""
        self._lightgbm = _import_lightgbm()
        self._prompts = Prompts()
        self._trees: tuple[Any, float] | None = None
        """The trees, and the weight of their prediction."""
        self.fitting = False
        """True while a fit is requested or running."""

    def call(self, encoded: Encoded) -> Call:
        """Return a call with its expectation from the prompt and the histories."""
        predicted = self._prompts.predict(encoded.prompt)
        more = 0.0 if predicted is None else predicted - encoded.turn
        shrunk = encoded.shrunk(more)
        row = np.concatenate(((more, *shrunk), encoded.row)).astype(np.float32)
        return Call(encoded, encoded.turn + shrunk[-1], row)

    def predict(self, call: Call) -> float | None:
        """Return the logarithm of its length, or None before the first fit."""
        if (fitted := self._trees) is None:
            return None
        trees, share = fitted
        by_trees = float(trees.predict(call.row[None], num_threads=1)[0])
        return call.expected + share * (by_trees - call.expected)

    def fit(self, some: Sequence[tuple[Call, float]]) -> None:
        """Fit to calls and the logarithms of their lengths."""
        try:
            calls, values = [call for call, _ in some], np.array([value for _, value in some])
            tasks = [call.encoded.task for call in calls]
            self._prompts.fit(np.stack([call.encoded.prompt for call in calls]), values, tasks)
            data = self._lightgbm.Dataset(np.stack([call.row for call in calls]), values)
            trees = self._lightgbm.train(_PARAMETERS, data, _TREES)
            self._trees = trees, len(calls) / (len(calls) + _HALF)
        finally:
            self.fitting = False
