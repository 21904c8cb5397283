"""The first rank's orders: what it does with its learner, all others do with theirs.

The first rank alone leases, publishes and acknowledges. A method that is marked `together` runs on every rank, with the same
arguments; a batch is each rank's own. While the first has no order to give, it gives heartbeats: a rank that hears nothing for
`[parallel] timeout_s`, or does not answer for as long, is lost to the others.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar

from trainer.data.batch import Batch
from trainer.errors import RankLost, TrainerError
from trainer.model.parallel import Ranks

T = TypeVar("T")


class Ordered(Protocol):
    """Whose methods are marked `together`."""

    ranks: Ranks
    ordered: bool
    """True within such a method: what it calls is part of it."""
    speaking: threading.Lock
    """Held by who gives an order, for there is one at a time."""


class _Said(enum.Enum):
    BATCH = enum.auto()
    """Stands for the batch of the rank that is told."""
    BEAT = enum.auto()
    """An order to do nothing."""


def together(method: Callable[..., T]) -> Callable[..., T]:
    """Makes a method run on every rank: the first tells the others. Raises RankLost, which names the method."""

    @wraps(method)
    def everywhere(self: Ordered, *arguments: Any) -> T:
        if self.ranks.size == 1 or self.ordered:
            return method(self, *arguments)
        with self.speaking, self.ranks.within(method.__name__):
            sent = tuple(_Said.BATCH if isinstance(each, Batch) else each for each in arguments)
            self.ranks.order((method.__name__, sent))
            with _part_of_an_order(self):
                return method(self, *arguments)

    return everywhere


@contextmanager
def _part_of_an_order(learner: Ordered) -> Iterator[None]:
    learner.ordered = True
    try:
        yield
    finally:
        learner.ordered = False


def follow(learner: Ordered) -> None:
    """Does what the first rank orders until it says that the run is over. Raises RankLost."""
    batch: Batch | None = None
    while (order := _next(learner.ranks)) is not None:
        if order is _Said.BEAT:
            continue
        name, sent = order
        arguments = tuple(batch if each is _Said.BATCH else each for each in sent)
        try:
            with learner.ranks.within(name), _part_of_an_order(learner):
                found = getattr(learner, name)(*arguments)
        except RankLost:
            raise
        except TrainerError:
            # The first rank has come to the same, and decides what follows.
            continue
        if isinstance(found, Batch):
            batch = found


def _next(ranks: Ranks) -> Any:
    with ranks.within("waiting for an order of rank 0"):
        return ranks.order()


def beat(learner: Ordered) -> None:
    """Finds out whether all ranks are there, unless an order is under way, which does so itself. Raises RankLost."""
    if not learner.speaking.acquire(blocking=False):
        return
    try:
        with learner.ranks.within("heartbeat"):
            learner.ranks.order(_Said.BEAT)
    finally:
        learner.speaking.release()


def dismiss(learner: Ordered) -> None:
    """Tells the other ranks that the run is over. Raises RankLost."""
    if learner.ranks.size > 1:
        with learner.speaking, learner.ranks.within("end"):
            learner.ranks.order(None)
    learner.ranks.leave()
