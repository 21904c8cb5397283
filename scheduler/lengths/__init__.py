"""Predicted lengths of calls: rankers that learn online which calls are the longest.

`Ranker` (base.py) is the seam. A ranker is one file here and one line in `RANKERS`.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.lengths.base import Features as Features
from scheduler.lengths.base import Prediction as Prediction
from scheduler.lengths.base import Ranker as Ranker
from scheduler.lengths.boosted import Aside, Boosted, at_once
from scheduler.lengths.history import History

_NOTHING = Prediction()


class NoRanker:
    """A ranker that predicts nothing."""

    def predict(self, features: Features) -> Prediction:
        return _NOTHING

    def learn(self, features: Features, length: int) -> None:
        """Do nothing."""


TAIL_SHARE = 0.2
"""The share of calls, those that are expected to be longest, that are tails."""
Make = Callable[[float, int, Aside], Ranker]

RANKERS: dict[str, Make] = {
    "none": lambda _share, _memory, _aside: NoRanker(),
    "history": lambda share, memory, _aside: History(share, memory),
    "boosted": Boosted,
}


def make_ranker(
    name: str, tail_share: float = TAIL_SHARE, memory: int = 10_000, aside: Aside = at_once
) -> Ranker:
    """A ranker by its name. `tail_share`: which share of calls are tails; `memory`: tasks that it remembers.

    `aside` does what takes long. Raises ValueError for a name that is none, ImportError if a package of its own is not there.
    """
    if (make := RANKERS.get(name)) is None:
        raise ValueError(f"no ranker {name!r}; there are: {', '.join(RANKERS)}")
    return make(tail_share, memory, aside)
