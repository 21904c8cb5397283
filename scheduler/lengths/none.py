"""No ranker: nothing is known of any call."""

from __future__ import annotations

from scheduler.lengths.base import Features, Prediction

_NOTHING = Prediction()


class NoRanker:
    """A ranker that predicts nothing."""

    def predict(self, features: Features) -> Prediction:
        """Nothing."""
        return _NOTHING

    def learn(self, features: Features, length: int) -> None:
        """Learns nothing."""
