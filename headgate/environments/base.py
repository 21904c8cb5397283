"""The seam between other people's environments and episodes. The standard library alone: it runs in the environment's own Python.

An environment has tasks, and plays one at a time against an episode's URL. It knows its dataset, its scorer and its tools;
the driver knows groups, retries, concurrency and rewards. Invariant: what a model did not cause raises `PlayFailed`, or any
other exception, and is never a reward of 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "eval", "all"]
HELDOUT = 16
"""One task in this many is for evaluation."""


class PlayFailed(Exception):
    """An episode earned nothing, by no fault of the model. `reason`: a word for why, such as `tool_failed`."""

    def __init__(self, message: str, reason: str = "environment_failed") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Found:
    """A task of an environment's dataset."""

    key: str
    """Its content, or a hash of it: equal tasks are never split between training and evaluation."""
    data: dict[str, Any]
    """JSON; enough to play it in another process."""


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome of an episode."""

    reward: float
    """The whole reward, that of single calls included."""
    components: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    """The part of the reward that single calls earned, by the id of their reply."""


class Environment(Protocol):
    """One environment, loaded. Several episodes are played at the same time, in one event loop."""

    def tasks(self) -> Iterable[Found]:
        """Yield the dataset in its order, perhaps without end."""

    async def open(self) -> None:
        """Start what the episodes share."""

    async def play(self, data: dict[str, Any], base_url: str, api_key: str) -> Played:
        """Play the task of `data` with the model at an OpenAI base URL. Raise PlayFailed, or anything else."""

    async def close(self) -> None:
        """End what `open` started."""


def split_of(key: str) -> Split:
    """Return the split that a task belongs to, by its key alone."""
    return "eval" if hashlib.sha256(key.encode()).digest()[0] % HELDOUT == 0 else "train"


def chosen(tasks: Iterable[Found], split: Split) -> Iterator[tuple[int, Found]]:
    """Yield the tasks of a split, each once, with their places in the dataset."""
    keys: set[str] = set()
    for place, found in enumerate(tasks):
        if found.key not in keys and split in ("all", split_of(found.key)):
            keys.add(found.key)
            yield place, found
