"""Fits the engines' speed: the coefficients of `scheduler.policies.throughput`, from the engines' own counters.

Each engine reports once a second how many tokens it has sampled. With the calls that ran meanwhile, this gives the time of a
step:

    step = k1 * kv + max(k2, k3 * n) + k4        (seconds; n calls with kv tokens in the cache)

Below the bend (a certain n) more calls cost nothing. For a given bend the formula is linear, so each observed n is tried as the
bend with non-negative least squares, and the best fit is taken. While all batches are small, k2 and k4 cannot be told apart;
their sum is divided as in the prior. The prior has the weight of a few samples, so coefficients without evidence keep its values.
Huber's rule gives outliers (a prefill, a pause) less weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.policies.throughput import EngineModel

_KEPT = 300
_LEAST = 20
"""Samples before anything is fitted."""
_EVERY = 10
"""Samples between two fits."""
_PRIOR_WEIGHT = 0.05
"""The prior counts as this share of the samples, for each coefficient by itself, in units of its own size."""
_ROUNDS = 5
_BENDS = 24

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One second of an engine."""

    running: float
    kv: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Fitting:
    """Coefficients, and how well they explain the samples."""

    model: EngineModel
    error: float
    """The median of the relative errors of a step's time."""
    samples: int


def fit(samples: Sequence[Sample], prior: EngineModel) -> Fitting:
    """The coefficients that explain the samples best. Raises ValueError without samples."""
    if not samples:
        raise ValueError("there are no samples to fit coefficients to")
    running = np.array([s.running for s in samples])
    kv, step = np.array([s.kv for s in samples]), np.array([s.step_s for s in samples])
    distinct = np.unique(running)
    picked = np.linspace(0, len(distinct) - 1, min(_BENDS, len(distinct))).astype(int)
    bends = [*distinct[picked].tolist(), float("inf"), 0.0]
    if prior.k3 > 0:
        bends.append(prior.k2 / prior.k3)
    found = [_at_bend(running, kv, step, bend, prior) for bend in dict.fromkeys(bends)]
    model = min(found, key=lambda pair: pair[0])[1]
    errors = np.abs(_predict(model, running, kv) / step - 1.0)
    return Fitting(model, float(np.median(errors)), len(samples))


def _at_bend(
    running: Array, kv: Array, step: Array, bend: float, prior: EngineModel
) -> tuple[float, EngineModel]:
    """The best coefficients whose batch is flat up to `bend` calls, and their cost."""
    if bend == 0.0:  # no flat part: k2 is 0
        columns, start = np.stack([kv, running, np.ones_like(kv)], axis=1), [prior.k1, prior.k3, prior.k4]
    elif bend == float("inf"):  # all flat: the samples say nothing about k3
        columns, start = np.stack([kv, np.ones_like(kv)], axis=1), [prior.k1, prior.k2 + prior.k4]
    else:
        batch = np.maximum(running, bend)
        columns, start = np.stack([kv, batch, np.ones_like(kv)], axis=1), [prior.k1, prior.k3, prior.k4]
    solved, cost = _robust(columns / step[:, None], np.array(start))
    if bend == 0.0:
        model = _checked(solved[0], 0.0, solved[1], solved[2], prior)
    elif bend == float("inf"):
        share = prior.k2 / (prior.k2 + prior.k4)
        flat = share * solved[1]
        model = _checked(solved[0], flat, min(prior.k3, flat / running.max()), solved[1] - flat, prior)
    else:
        model = _checked(solved[0], solved[1] * bend, solved[1], solved[2], prior)
    return cost, model


def _robust(columns: Array, start: Array) -> tuple[Array, float]:
    """Non-negative x with columns @ x near 1, drawn to `start`; by least squares, reweighted after Huber. And the cost."""
    scale = np.where(start > 0, start, 1e-9)
    scaled, ones = columns * scale, np.ones(len(columns))
    weights = ones
    pull = np.eye(len(start)) * np.sqrt(_PRIOR_WEIGHT * 0.01 * len(columns))
    aim = pull @ np.where(start > 0, 1.0, 0.0)
    x, sigma = ones[: len(start)], 1.0
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        x = _nonnegative(np.vstack([scaled * root[:, None], pull]), np.concatenate([root, aim]))
        gap = np.abs(scaled @ x - 1.0)
        sigma = max(float(np.median(gap)) * 1.5, 1e-6)
        weights = np.minimum(1.0, 1.345 * sigma / np.maximum(gap, 1e-12))
    gap = np.abs(scaled @ x - 1.0)
    huber = np.where(gap < 0.05, gap**2 / 2, 0.05 * (gap - 0.025))
    return x * scale, float(huber.sum() + 0.5 * ((pull @ x - aim) ** 2).sum())


def _nonnegative(a: Array, b: Array) -> Array:
    """Least squares with x >= 0, by trying which few coefficients are zero: there are at most three."""
    count, best, least = a.shape[1], np.zeros(a.shape[1]), float(b @ b)
    for mask in range(1, 2**count):
        free = [i for i in range(count) if mask >> i & 1]
        part = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        if (part < 0).any():
            continue
        rest = b - a[:, free] @ part
        if (cost := float(rest @ rest)) < least:
            best, least = np.zeros(count), cost
            best[free] = part
    return best


def _checked(k1: float, k2: float, k3: float, k4: float, prior: EngineModel) -> EngineModel:
    if max(k2, k3) + k4 <= 0:
        return prior
    return EngineModel(float(k1), float(k2), float(k3), float(k4))


def _predict(model: EngineModel, running: Array, kv: Array) -> Array:
    return model.k1 * kv + np.maximum(model.k2, model.k3 * running) + model.k4


@dataclass(slots=True)
class _Engine:
    generation: int
    at: float
    sampled: int
    running: int
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_KEPT))
    new: int = 0
    fitting: Fitting | None = None


class SpeedModels:
    """Every engine's samples and coefficients."""

    def __init__(self, prior: EngineModel) -> None:
        self.prior = prior
        self._engines: dict[str, _Engine] = {}
        self._changed: set[str] = set()

    def observe(self, name: str, generation: int, now: float, running: int, kv: int, sampled: int) -> float:
        """Takes an engine's count of sampled tokens since its start; returns its tokens per second since the last count.

        The second counts as a sample if about the same calls, and no others, ran from its beginning to its end.
        """
        engine = self._engines.get(name)
        if engine is None or engine.generation != generation or sampled < engine.sampled:
            kept = engine.samples if engine is not None else deque(maxlen=_KEPT)
            self._engines[name] = _Engine(generation, now, sampled, running, kept)
            if engine is not None:
                self._engines[name].fitting = engine.fitting
            return 0.0
        seconds, tokens = now - engine.at, sampled - engine.sampled
        rate = tokens / seconds if seconds > 0 else 0.0
        steady = engine.running > 0 and abs(running - engine.running) <= max(1, engine.running // 10)
        if steady and rate > 0:
            mean = (running + engine.running) / 2
            engine.samples.append(Sample(mean, kv, mean / rate))
            engine.new += 1
        engine.at, engine.sampled, engine.running = now, sampled, running
        if engine.new >= _EVERY and len(engine.samples) >= _LEAST:
            engine.new, engine.fitting = 0, fit(list(engine.samples), self.prior)
            self._changed.add(name)
        return rate

    def changed(self) -> list[tuple[str, EngineModel]]:
        """The engines whose coefficients were fitted since the last time."""
        names, self._changed = sorted(self._changed), set()
        found = ((name, self._engines[name].fitting) for name in names if name in self._engines)
        return [(name, fitting.model) for name, fitting in found if fitting is not None]

    def models(self) -> dict[str, EngineModel]:
        """The coefficients of engines that have been fitted."""
        return {name: one.fitting.model for name, one in self._engines.items() if one.fitting is not None}

    def forget(self, there: Container[str]) -> None:
        """Engines that are gone are forgotten."""
        for name in [name for name in self._engines if name not in there]:
            del self._engines[name]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Describes the models for the admin API: coefficients in seconds, and the median relative error; None until fitted."""
        found: dict[str, dict[str, Any]] = {}
        for name, engine in self._engines.items():
            model = engine.fitting.model if engine.fitting else self.prior
            found[name] = {
                **{key: getattr(model, key) for key in ("k1", "k2", "k3", "k4")},
                "error": round(engine.fitting.error, 4) if engine.fitting else None,
                "samples": len(engine.samples),
            }
        return found
