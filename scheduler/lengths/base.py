"""The interface of rankers, which predict the lengths of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features of a call that are known when it starts."""

    call: str
    task: str
    group: str
    episode: str
    turn: int
    """The number of earlier replies in the conversation."""
    prompt: Any
    """Token ids, an array of shape (tokens,) or a sequence."""
    messages: int = 0
    tools: int = 0
    most: int = 0
    """`max_tokens`; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A ranker's prediction for a call."""

    expected: float = 0.0
    """Tokens."""
    tail: bool = False
    """True if the call is predicted to be one of the longest."""
    known: bool = False
    """True if the prediction comes from data; if False, the other fields mean nothing."""


class Ranker(Protocol):
    """Learns from finished calls, and predicts new ones.

    Invariants: predictions are a function of the calls so far, in their order; the memory is bounded; no method takes longer than
    about a millisecond, and none is for several threads concurrently.
    """

    def predict(self, features: Features) -> Prediction:
        """Predict the length of a new call."""
        ...

    def learn(self, features: Features, length: int) -> None:
        """Learn from a finished call of `length` sampled tokens, predicted or not."""
        ...
