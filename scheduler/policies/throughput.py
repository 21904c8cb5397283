"""The tokens per second that an engine samples, as a function of its running calls (StaleFlow, arXiv 2601.12784).

One decode step reads the cache of every running call (`k1` a token), does the arithmetic of the batch (flat up to `k2 / k3`
calls, then `k3` a call) and has a fixed cost (`k4`). Every running call gets one token a step, so

    T(n, kv) = n / (k1 * kv + max(k2, k3 * n) + k4).

T grows with every call while the batch is small, and falls when a long call joins many short ones: the gain may be negative.

Calls may have weights (see `placement.py`): then the gain is in the sum of each call's weight times its speed. With weights of
one that is T.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The coefficients of one kind of engine, in seconds."""

    k1: float = 1e-7
    """Seconds of a step for each token in the cache of running calls."""
    k2: float = 5e-3
    """The least seconds of a step for the batch."""
    k3: float = 1e-4
    """Seconds of a step for each running call, once the batch is large."""
    k4: float = 5e-3
    """The fixed seconds of a step."""

    def __post_init__(self) -> None:
        if min(self.k1, self.k2, self.k3, self.k4) < 0 or max(self.k2, self.k3) + self.k4 <= 0:
            raise ValueError(f"the coefficients of an engine are at least 0, and a step takes time: {self}")

    def step_s(self, running: float, kv: float) -> float:
        """Return the seconds of one decode step of `running` calls with `kv` tokens in the cache."""
        return self.k1 * kv + max(self.k2, self.k3 * running) + self.k4

    def rate(self, running: float, kv: float) -> float:
        """Return the tokens per second."""
        return running / self.step_s(running, kv) if running else 0.0

    def gain(self, running: int, kv: float, length: float, extra: float = 0.0, weight: float = 1.0) -> float:
        """Return the tokens per second that one more call of `length` tokens adds; negative if it slows the others by more.

        `weight`: the weight of the call; `extra`: the sum of the others' weights beyond one each.
        """
        before = (running + extra) / self.step_s(running, kv) if running else 0.0
        return (running + extra + weight) / self.step_s(running + 1, kv + length) - before

    def alone(self, length: float) -> float:
        """Return the tokens per second that the call would add to an empty engine, which is the most it can add."""
        return self.rate(1, length)
