"""A ranker that learns online: a regression that is good soon, and boosted trees (LightGBM) that are good with many calls.

The newest calls are kept, each as it was seen when it began (`encoding`), and both are fitted to the logarithms of their lengths
now and then: soon after the first calls, later after every eighth more, at last after every `_EVERY`. The regression says what is
expected of the prompt; the histories of the call's task, turn, group and episode draw that to what they know. Trees see all of
it, and what they say counts the more the more calls they were fitted to. Before the first fit it is what `history` says.

A fit takes up to some seconds; it is made elsewhere (`aside`), and LightGBM does not hold the interpreter meanwhile. The moment
from which a fit counts depends on how soon it is done: what is said is a function of what was shown and of those moments. Fits
have one thread and a fixed seed.
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

from scheduler.lengths.base import Features, Prediction
from scheduler.lengths.encoding import Encoder, Row, Seen
from scheduler.lengths.history import History
from scheduler.lengths.memory import Threshold
from scheduler.lengths.prompts import Prompts

Aside = Callable[[Callable[[], None]], Any]
"""Does work that takes long, one piece after the other."""

_OPENMP = "libgomp.so.1"
_FIRST = 32
"""Calls before the first fit, and at least between two."""
_EVERY = 1000
_WINDOW = 8000
"""Calls that are fitted to."""
_MOST_OPEN = 4096
"""Calls that are kept as they were seen until they are over; of others what is known then is taken for what was known."""
_HALF = 4000
"""Trees that were fitted to so many calls count half."""
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
    """LightGBM, imported late because that takes a second. Raises ImportError."""
    try:
        _load_openmp()
        import lightgbm
    except (ImportError, OSError) as error:
        raise ImportError(f"the ranker `boosted` needs `pip install 'headgate[lengths]'`: {error}") from error
    return lightgbm


def _load_openmp() -> None:
    """Loads the OpenMP library that LightGBM needs: the system's, else the one in torch's package (torch is not imported)."""
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


def at_once(work: Callable[[], None]) -> None:
    """Does work here and now."""
    work()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call, as it was seen when it began, and what was expected then."""

    seen: Seen
    expected: float
    """Without trees; the logarithm."""
    row: Row
    """The input of the trees."""


class Boosted:
    """A ranker of gradient-boosted trees."""

    def __init__(self, tail_share: float, memory: int, aside: Aside = at_once) -> None:
        """`memory`: tasks (and groups, and episodes) that it remembers. Raises ImportError if LightGBM is not there."""
        self._models = Models()
        self._encoder = Encoder(memory)
        self._history = History(tail_share, memory)
        self._threshold = Threshold(tail_share)
        self._aside = aside
        self._open: OrderedDict[str, Call] = OrderedDict()
        """Calls that were predicted: what is learnt is to predict with no more than was known then."""
        self._newest: deque[tuple[Call, float]] = deque(maxlen=_WINDOW)
        self._count = 0
        self._due = _FIRST

    def predict(self, features: Features) -> Prediction:
        call = self._open[features.call] = self._models.call(self._encoder.seen(features))
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        if (score := self._models.predict(call)) is None:
            return self._history.predict(features)
        expected = math.expm1(min(max(score, 0.7), 20.0))
        return Prediction(min(expected, features.most or math.inf), self._threshold.above(score), True)

    def learn(self, features: Features, length: int) -> None:
        call = self._open.pop(features.call, None) or self._models.call(self._encoder.seen(features))
        self._newest.append((call, math.log1p(length)))
        self._encoder.add(features, length)
        self._history.learn(features, length)
        self._count += 1
        if self._count >= self._due and not self._models.fitting:
            self._due = self._count + min(max(self._count // 8, _FIRST), _EVERY)
            self._models.fitting = True
            self._aside(partial(self._models.fit, tuple(self._newest)))


class Models:
    """The models that are refitted from time to time. `call` and `predict` may run while another thread is in `fit`."""

    def __init__(self) -> None:
        """Raises ImportError if LightGBM is not there."""
        self._lightgbm = _import_lightgbm()
        self._prompts = Prompts()
        self._trees: tuple[Any, float] | None = None
        """The trees, and the weight of their prediction beside the one without them."""
        self.fitting = False
        """A fit was asked for, and is not done."""

    def call(self, seen: Seen) -> Call:
        """The features of a call from its prompt and its histories."""
        told = self._prompts.predict(seen.prompt)
        more = 0.0 if told is None else told - seen.turn
        drawn = seen.drawn(more)
        row = np.concatenate(((more, *drawn), seen.row)).astype(np.float32)
        return Call(seen, seen.turn + drawn[-1], row)

    def predict(self, call: Call) -> float | None:
        """The logarithm of its length; None: nothing has been fitted."""
        if (fitted := self._trees) is None:
            return None
        trees, share = fitted
        said = float(trees.predict(call.row[None], num_threads=1)[0])
        return call.expected + share * (said - call.expected)

    def fit(self, some: Sequence[tuple[Call, float]]) -> None:
        """Fits to calls and the logarithms of their lengths."""
        try:
            calls, values = [call for call, _ in some], np.array([value for _, value in some])
            tasks = [call.seen.task for call in calls]
            self._prompts.fit(np.stack([call.seen.prompt for call in calls]), values, tasks)
            data = self._lightgbm.Dataset(np.stack([call.row for call in calls]), values)
            trees = self._lightgbm.train(_PARAMETERS, data, _TREES)
            self._trees = trees, len(calls) / (len(calls) + _HALF)
        finally:
            self.fitting = False
