"""Fits the engines' speed: the coefficients of `scheduler.policies.throughput`, from the engines' own counters.

The counters of each engine are read once a second. A sample is the difference of two readings: the calls of a step, its
seconds and the tokens of prompts that were computed in it.

    step = s_per_kv_token * kv + max(s_per_batch, s_per_call * n) + s_per_step + prefill_s * p

with n calls, kv tokens in the cache and p tokens of prompts. Below the bend (a certain n) more calls cost nothing. For a given
bend the formula is linear, so each observed n is tried as the bend with non-negative least squares, and the best fit is used.
While all batches are small, `s_per_batch` and `s_per_step` cannot be distinguished; their sum is divided as in the prior. The
prior has the weight of a few samples, so coefficients without evidence keep its values; a prompt's token is as much as a call
of a full batch (`s_per_call`) until prefills were observed. Huber's rule gives outliers (a pause) less weight. An engine that
has too few samples for a fit has the prior, as many times slower or faster as its samples are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.engines.base import Load
from scheduler.policies.throughput import EngineModel

_KEPT = 300
_LEAST = 20
"""Samples before anything is fitted."""
_EVERY = 10
"""Samples between two fits."""
_STEPS = 8
"""Steps that a sample holds at least: of fewer, those at its ends are too large a part."""
_PRIOR_WEIGHT = 0.05
"""The prior counts as this share of the samples, for each coefficient by itself, in units of its own size."""
_ROUNDS = 5
_BENDS = 24

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Some steps of an engine, as their mean."""

    running: float
    kv: float
    step_s: float
    prompts: float = 0.0
    """Tokens of prompts that were computed in a step."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """Coefficients, and how well they explain the samples."""

    model: EngineModel
    prefill_s: float
    """Seconds that a token of a prompt adds to a step."""
    error: float
    """The median of the relative errors of a step's time."""
    samples: int


def fit(samples: Sequence[Sample], prior: EngineModel) -> Fitting:
    """Return the coefficients that fit the samples best. Raise ValueError without samples."""
    if not samples:
        raise ValueError("there are no samples to fit coefficients to")
    running, kv, step, prompts = np.array([[s.running, s.kv, s.step_s, s.prompts] for s in samples]).T
    distinct = np.unique(running)
    picked = np.linspace(0, len(distinct) - 1, min(_BENDS, len(distinct))).astype(int)
    bends = [*distinct[picked].tolist(), float("inf"), 0.0]
    if prior.s_per_call > 0:
        bends.append(prior.s_per_batch / prior.s_per_call)
    found = [_at_bend(running, kv, step, prompts, bend, prior) for bend in dict.fromkeys(bends)]
    _, model, prefill_s = min(found, key=lambda one: one[0])
    batch_s = np.maximum(model.s_per_batch, model.s_per_call * running)
    predicted = model.s_per_kv_token * kv + batch_s + model.s_per_step + prefill_s * prompts
    return Fitting(model, prefill_s, float(np.median(np.abs(predicted / step - 1.0))), len(samples))


def _at_bend(
    running: Array, kv: Array, step: Array, prompts: Array, bend: float, prior: EngineModel
) -> tuple[float, EngineModel, float]:
    """Return the best coefficients whose batch is flat up to `bend` calls: their cost, the model, and a prompt's token."""
    flat = bend == float("inf")  # the samples do not determine s_per_call
    fixed, of_prompts, of_cache = np.ones_like(kv), (prompts, prior.s_per_call), (kv, prior.s_per_kv_token)
    if flat:
        parts = [of_cache, of_prompts, (fixed, prior.s_per_batch + prior.s_per_step)]
    else:
        parts = [
            of_cache,
            of_prompts,
            (fixed, prior.s_per_step),
            (np.maximum(running, bend), prior.s_per_call),
        ]
    columns, start = np.stack([column for column, _ in parts], axis=1), np.array([k for _, k in parts])
    (kv_token_s, prefill_s, step_s, *rest), cost = _robust(columns / step[:, None], start)
    if flat:
        batch_s = prior.s_per_batch / (prior.s_per_batch + prior.s_per_step) * step_s
        step_s, call_s = step_s - batch_s, min(prior.s_per_call, batch_s / running.max())
    else:
        call_s = rest[0]
        batch_s = call_s * bend
    if max(batch_s, call_s) + step_s <= 0:
        return cost, prior, float(prefill_s)
    return cost, EngineModel(*map(float, (kv_token_s, batch_s, call_s, step_s))), float(prefill_s)


def _robust(columns: Array, start: Array) -> tuple[Array, float]:
    """Non-negative x with columns @ x near 1, drawn to `start`; by least squares, reweighted after Huber. And the cost."""
    scale = np.where(start > 0, start, 1e-9)
    scaled = columns * scale
    weights = np.ones(len(columns))
    pull = _PRIOR_WEIGHT * 0.01 * len(columns) * np.eye(len(start))
    aim = np.where(start > 0, 1.0, 0.0)
    x, sigma = aim, 1.0
    for _ in range(_ROUNDS):
        weighted = scaled.T * weights
        x = _nonnegative(weighted @ scaled + pull, weighted.sum(axis=1) + pull @ aim)
        gap = np.abs(scaled @ x - 1.0)
        sigma = max(float(np.median(gap)) * 1.5, 1e-6)
        weights = np.minimum(1.0, 1.345 * sigma / np.maximum(gap, 1e-12))
    gap = np.abs(scaled @ x - 1.0)
    huber = np.where(gap < 0.05, gap**2 / 2, 0.05 * (gap - 0.025))
    return x * scale, float(huber.sum() + 0.5 * (x - aim) @ pull @ (x - aim))


def _nonnegative(a: Array, b: Array) -> Array:
    """Return the x >= 0 with the least x @ a @ x / 2 - b @ x; `a` is positive definite.

    If no x is negative without that bound, none is better; or else it tries which of the few (at most four) are zero.
    """
    best = np.linalg.solve(a, b)
    if (best >= 0).all():
        return best
    best, least = np.zeros(len(b)), 0.0
    for free in (list(some) for size in range(1, len(b)) for some in combinations(range(len(b)), size)):
        part = np.linalg.solve(a[np.ix_(free, free)], b[free])
        if (part >= 0).all() and (cost := float(-b[free] @ part / 2)) < least:
            best, least = np.zeros(len(b)), cost
            best[free] = part
    return best


@dataclass(frozen=True, slots=True)
class _Look:
    """An engine at one moment."""

    at: float
    running: int
    kv: int
    load: Load

    def alike(self, other: _Look) -> bool:
        """Return true if about the same number of calls runs."""
        both = self.running, other.running
        return min(both) > 0 and max(both) - min(both) <= max(1, self.running // 10)


def _sample(start: _Look, now: _Look) -> Sample | None:
    """Return the steps between two looks; None: they are too few.

    An engine that does not count its steps has made one for each token of a running call.
    """
    tokens, kv = now.load.sampled - start.load.sampled, (start.kv + now.kv) / 2
    before, after = start.load.counts, now.load.counts
    if before is None or after is None:
        running = (start.running + now.running) / 2
        if tokens < _STEPS * running:
            return None
        return Sample(running, kv, running * (now.at - start.at) / tokens)
    steps, gaps = after.steps - before.steps, after.gaps - before.gaps
    if min(steps, tokens, gaps) < _STEPS:
        return None
    step_s = (after.gaps_s - before.gaps_s) / gaps
    return Sample(tokens / steps, kv, step_s, (after.prompts - before.prompts) / steps)


@dataclass(slots=True)
class _Engine:
    generation: int
    start: _Look
    """The look at which the next sample begins."""
    last: _Look
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_KEPT))
    new: int = 0
    fitting: Fitting | None = None
    guess: EngineModel | None = None
    """The first guess; None before the first sample."""

    @property
    def model(self) -> EngineModel | None:
        """The coefficients that are known best; None before the first sample."""
        return self.fitting.model if self.fitting else self.guess


def _scaled(prior: EngineModel, samples: Iterable[Sample]) -> EngineModel:
    """Return the prior, times the median of what the samples' steps take compared with it."""
    ratio = median(s.step_s / (prior.step_s(s.running, s.kv) + prior.s_per_call * s.prompts) for s in samples)
    return prior.times(ratio)


class SpeedModels:
    """Every engine's samples and coefficients."""

    def __init__(self, prior: EngineModel) -> None:
        self.prior = prior
        self._engines: dict[str, _Engine] = {}
        self._changed: set[str] = set()

    def observe(self, name: str, generation: int, now: float, running: int, kv: int, load: Load) -> float:
        """Take an engine's report, and how many calls run in it with how many tokens; return its tokens per second since the
        last one.

        The steps since a look count as a sample once they are enough, if about the same number of calls ran all the time.
        """
        look, engine = _Look(now, running, kv, load), self._engines.get(name)
        if engine is None:
            self._engines[name] = _Engine(generation, look, look)
            return 0.0
        if engine.generation != generation or load.sampled < engine.last.load.sampled:
            engine.generation, engine.start, engine.last = generation, look, look
            return 0.0
        seconds, tokens = now - engine.last.at, load.sampled - engine.last.load.sampled
        engine.last = look
        if not engine.start.alike(look):
            engine.start = look
        elif (sample := _sample(engine.start, look)) is not None:
            engine.samples.append(sample)
            engine.start, engine.new = look, engine.new + 1
            if engine.fitting is None:
                engine.guess = _scaled(self.prior, engine.samples)
                self._changed.add(name)
        if engine.new >= _EVERY and len(engine.samples) >= _LEAST:
            engine.new, engine.fitting = 0, fit(list(engine.samples), self.prior)
            self._changed.add(name)
        return tokens / seconds if seconds > 0 else 0.0

    def changed(self) -> list[tuple[str, EngineModel]]:
        """Return the engines whose coefficients were guessed or fitted since the last time."""
        names, self._changed = self._changed, set()
        return [(name, model) for name, model in sorted(self.models().items()) if name in names]

    def models(self) -> dict[str, EngineModel]:
        """Return the coefficients of the engines that have shown their speed."""
        return {name: one.model for name, one in self._engines.items() if one.model is not None}

    def forget(self, present: Container[str]) -> None:
        """Forget the engines that are not `present`."""
        for name in [name for name in self._engines if name not in present]:
            del self._engines[name]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Describe the models for the admin API: coefficients in seconds, and the median relative error; None until fitted."""
        found: dict[str, dict[str, Any]] = {}
        for name, engine in self._engines.items():
            model = engine.model or self.prior
            found[name] = {
                **asdict(model),
                "prefill_s": engine.fitting.prefill_s if engine.fitting else None,
                "error": round(engine.fitting.error, 4) if engine.fitting else None,
                "samples": len(engine.samples),
            }
        return found
