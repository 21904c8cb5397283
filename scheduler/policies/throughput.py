"""The tokens per second that an engine samples, as a function of its running calls (StaleFlow, arXiv 2601.12784).

One decode step reads the cache of every running call (`s_per_kv_token` a token), does the arithmetic of the batch (flat up to
`s_per_batch / s_per_call` calls, then `s_per_call` a call) and has a fixed cost (`s_per_step`): the paper's k1 to k4. Every
running call gets one token a step, so

    T(n, kv) = n / (s_per_kv_token * kv + max(s_per_batch, s_per_call * n) + s_per_step).

T grows with every call while the batch is small, and falls when a long call joins many short ones: the gain may be negative.

Calls may have weights (see `placement.py`): then the gain is in the sum of each call's weight times its speed. With weights of
one that is T.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The coefficients of one kind of engine, in seconds."""

    s_per_kv_token: float = 1e-7
    """Seconds of a step for each token in the cache of running calls."""
    s_per_batch: float = 5e-3
    """The least seconds of a step for the batch."""
    s_per_call: float = 1e-4
    """Seconds of a step for each running call, once the batch is large."""
    s_per_step: float = 5e-3
    """The fixed seconds of a step."""

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0 or max(self.s_per_batch, self.s_per_call) + self.s_per_step <= 0:
            raise ValueError(f"the coefficients of an engine are at least 0, and a step takes time: {self}")

    def times(self, factor: float) -> EngineModel:
        """Return the model of an engine that is slower by `factor`."""
        return EngineModel(*(seconds * factor for seconds in astuple(self)))

    def step_s(self, running: float, kv: float) -> float:
        """Return the seconds of one decode step of `running` calls with `kv` tokens in the cache."""
        return self.s_per_kv_token * kv + max(self.s_per_batch, self.s_per_call * running) + self.s_per_step

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


COEFFICIENTS = tuple(field.name for field in fields(EngineModel))
