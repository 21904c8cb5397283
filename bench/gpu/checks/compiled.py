"""The step of `alone` with compiled layers, as runs on a GPU have them by default."""

from __future__ import annotations

from bench.gpu.checks import alone
from bench.gpu.checks.place import Figures, Place
from trainer.model import compiled


def measure(place: Place) -> Figures:
    """Return the figures of `alone`, and the number of graphs."""
    return {**alone.measure(place, compile=not place.dry), "graphs": compiled.graphs()}
