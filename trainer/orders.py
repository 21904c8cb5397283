"""The first rank's orders: what it does with its learner, all others do with theirs.

The first rank alone leases, publishes and acknowledges. A method that is marked `together` runs on every rank, with the same
arguments; a batch is each rank's own.
"""

from __future__ import annotations

import enum
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


class _Own(enum.Enum):
    BATCH = enum.auto()
    """Stands for the batch of the rank that is told."""


def together(method: Callable[..., T]) -> Callable[..., T]:
    """Makes a method run on every rank: the first tells the others. Raises RankLost, which names the method."""

    @wraps(method)
    def everywhere(self: Ordered, *arguments: Any) -> T:
        if self.ranks.size == 1 or self.ordered:
            return method(self, *arguments)
        with self.ranks.within(method.__name__):
            sent = tuple(_Own.BATCH if isinstance(each, Batch) else each for each in arguments)
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
        name, sent = order
        arguments = tuple(batch if each is _Own.BATCH else each for each in sent)
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


def _next(ranks: Ranks) -> tuple[str, tuple[Any, ...]] | None:
    with ranks.within("waiting for the first rank"):
        order: tuple[str, tuple[Any, ...]] | None = ranks.order()
        return order


def dismiss(learner: Ordered) -> None:
    """Tells the other ranks that the run is over. Raises RankLost."""
    if learner.ranks.size > 1:
        with learner.ranks.within("end"):
            learner.ranks.order(None)
    learner.ranks.leave()
