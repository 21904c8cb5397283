"""The seam: who says how long a call will be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The known features of a call at its beginning."""

    call: str
    task: str
    group: str
    episode: str
    turn: int
    """The number of earlier answers in the conversation."""
    prompt: Any
    """Token ids, an array of shape (tokens,) or a sequence."""
    messages: int = 0
    tools: int = 0
    most: int = 0
    """`max_tokens`; 0: not known."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A ranker's prediction for a call."""

    expected: float = 0.0
    """Tokens."""
    tail: bool = False
    """True if the call is predicted to be one of the longest."""
    known: bool = False
    """True if the prediction comes from learnt data; if False, the rest means nothing."""


class Ranker(Protocol):
    """Learns from calls that are over, and predicts those that begin.

    Invariants: what it says is a function of what it was shown, in that order; its memory is bounded; neither method takes longer
    than about a millisecond, and neither is for several threads at once.
    """

    def predict(self, features: Features) -> Prediction:
        """Predicts a call that begins."""
        ...

    def learn(self, features: Features, length: int) -> None:
        """A call is over, and sampled `length` tokens. It need not have been predicted."""
        ...
