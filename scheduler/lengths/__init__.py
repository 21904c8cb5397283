"""Predicted lengths of calls: rankers that learn online which calls are the longest.

`Ranker` (base.py) is the seam. A ranker is one file here and one line in `RANKERS`.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.lengths.base import Features as Features
from scheduler.lengths.base import Prediction as Prediction
from scheduler.lengths.base import Ranker as Ranker
from scheduler.lengths.boosted import Boosted, Run, run_inline
from scheduler.lengths.history import History

TAIL_SHARE = 0.2
"""The share of calls, those that are expected to be longest, that are tails."""
_NOTHING = Prediction()


class NoRanker:
    """A ranker that predicts nothing."""

    def predict(self, features: Features) -> Prediction:
        return _NOTHING

    def learn(self, features: Features, length: int) -> None:
        """Do nothing."""


Make = Callable[[float, int, Run], Ranker]

RANKERS: dict[str, Make] = {
    "none": lambda _share, _memory, _run: NoRanker(),
    "history": lambda share, memory, _run: History(share, memory),
    "boosted": Boosted,
}


def make_ranker(
    name: str, tail_share: float = TAIL_SHARE, memory: int = 10_000, run: Run = run_inline
) -> Ranker:
    """Return the ranker of that name. Raise ValueError for an unknown name, ImportError if its package is missing.

    `tail_share`: the share of calls that are tails. `memory`: tasks that it remembers. `run`: runs fits.
    """
    if (make := RANKERS.get(name)) is None:
        raise ValueError(f"no ranker {name!r}; there are: {', '.join(RANKERS)}")
    return make(tail_share, memory, run)
