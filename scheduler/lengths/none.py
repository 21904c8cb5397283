"""No ranker: no call is predicted."""

from __future__ import annotations

from scheduler.lengths.base import Features, Prediction

_NOTHING = Prediction()


class NoRanker:
    """A ranker that predicts nothing."""

    def predict(self, features: Features) -> Prediction:
        return _NOTHING

    def learn(self, features: Features, length: int) -> None:
        """Learn nothing."""
