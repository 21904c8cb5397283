"""Engines of their own for the calls that are expected to be longest (StreamRL, arXiv 2504.15930, Alg. 2). Pure.

Calls are ranked by their expected length; the top `alpha` of them are the tails. A call lasts PTL(BS) * L seconds: PTL(BS) is a
decode step with BS calls in the batch, L its tokens. An engine with M calls, of which BS run at once, lasts
PTL(BS) * L * ceil(M / BS). With L the P90 of all expected lengths for tails (about the median of the top fifth) and the P50 for
the rest, every division of N engines into N_l for tails and N_r for the rest is tried, and the quickest is taken. The engines run
beside one another, so the time of both groups is the greater of the two; a description of the paper that we have adds them up,
which would be right only if one group waited for the other.

Not to divide is one of the choices: then every engine may have a tail, and lasts as long as one. By its own model a division is
never slower than none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.policies.throughput import EngineModel

ALPHA = 0.2
"""The share of calls that are tails, as in the paper."""
_TAIL_PERCENT, _REST_PERCENT = 90, 50


@dataclass(frozen=True, slots=True)
class Expected:
    """A call's expected size."""

    tokens: float
    """Tokens that it is expected to sample."""
    prompt: int = 0
    """Tokens of its prompt."""


@dataclass(frozen=True, slots=True)
class Division:
    """The numbers of engines for tails and for the rest, and the seconds that each group would take."""

    tails: int
    """0: the engines are not divided."""
    rest: int
    tails_s: float
    rest_s: float

    @property
    def seconds(self) -> float:
        """The seconds until both groups are through."""
        return max(self.tails_s, self.rest_s)


def divide(
    calls: Sequence[Expected], engines: int, model: EngineModel, slots: int, alpha: float = ALPHA
) -> Division:
    """Chooses how many engines to keep for tails: the quickest division, of equals the one with fewest. Raises ValueError."""
    _check(engines, slots, alpha)
    count = tail_count(len(calls), alpha)
    lengths = sorted(call.tokens for call in calls)
    prompt = sum(call.prompt for call in calls) / max(len(calls), 1)
    tail, rest = _percentile(lengths, _TAIL_PERCENT), _percentile(lengths, _REST_PERCENT)

    def seconds(number: int, among: int, tokens: float) -> float:
        return engine_s(-(-number // among), tokens, prompt, model, slots)

    whole = seconds(len(calls), engines, tail)
    best = Division(0, engines, whole, whole)
    for tails in range(1, engines if count else 1):
        others = engines - tails
        tails_s, rest_s = seconds(count, tails, tail), seconds(len(calls) - count, others, rest)
        best = min(best, Division(tails, others, tails_s, rest_s), key=lambda d: d.seconds)
    return best


def engine_s(calls: int, tokens: float, prompt: float, model: EngineModel, slots: int) -> float:
    """Seconds of an engine with so many calls of `tokens` tokens each: PTL(BS) * L * ceil(M / BS).

    The cache holds the prompts of the batch and, on average over its time, half of what it samples.
    """
    if not calls:
        return 0.0
    batch = min(calls, slots)
    step_s = model.step_s(batch, batch * (prompt + tokens / 2))
    return step_s * tokens * -(-calls // batch)


def tail_count(calls: int, alpha: float = ALPHA) -> int:
    """Returns how many of `calls` are tails: the share, rounded up, and never all of them."""
    if alpha <= 0 or calls < 2:
        return 0
    return min(math.ceil(round(calls * alpha, 9)), calls - 1)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that is at least as great as `percent` % of them (nearest rank); 0 where there is none."""
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1] if ordered else 0.0


def _check(engines: int, slots: int, alpha: float) -> None:
    for name, value in (("engines", engines), ("slots", slots)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be at least 0 and below 1, not {alpha}")
