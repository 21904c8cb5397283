"""Judges by an engine's log-probabilities whether it computes what its version should.

A probe detects weights that make no sense; identity is proven bit by bit where the engine can compare (`proof`). Where it cannot,
the distance to the parent version decides, if it is several times the measured noise. All gaps are means over the probe's tokens,
in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["passed", "indistinct", "failed"]

SEVERAL = 4.0
"""Two versions are distinct if they are at a distance of this many times the noise.

By the triangle inequality, a correct engine then fails only if its own gap is three times the noise that was measured before.
"""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The result of a probe. All gaps between log-probabilities are means over the probe's tokens, in nats."""

    verdict: Verdict
    gap: float
    """The gap between the engine and the expected version."""
    parent_gap: float | None
    """The gap between the engine and the parent version."""
    distance: float | None
    """The gap between the two versions themselves."""
    noise: float | None
    """The gap below which versions cannot be distinguished: the largest measured one."""
    margin: float | None
    """(parent_gap - gap) / distance: 1 for the expected weights, -1 for the parent's; None if they are indistinct."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def judge(
    measured: Sequence[float],
    expected: Sequence[float],
    parent: Sequence[float],
    *,
    tolerance: float,
    noise: float = 0.0,
    usual: float = 0.0,
    proven: bool = False,
) -> ProbeReport:
    """Compare an engine's log-probabilities (nats, one per token) with those of a version and of its parent.

    An engine fails if it is further than `tolerance` from the version; one that is `proven` to hold it only if it is also further
    than `SEVERAL` times its `usual` gap, since rounding to few bits alone may exceed a constant. It also fails if it is nearer to
    the parent, unless it is proven. Where the two versions differ by less than `SEVERAL` times the noise, the verdict is
    `indistinct`, which is not a failure. The noise is the largest of `noise` (measured before: the engine's gap at the version
    before, the trainer's gap between two passes) and the engine's gap to the nearer of both. `parent` may be empty (the first
    version). Raise ValueError if the lengths differ.
    """
    gap = _mean_gap(measured, expected)
    sane = gap <= max(tolerance, SEVERAL * usual if proven else 0.0)
    if not parent:
        return ProbeReport("passed" if sane else "failed", gap, None, None, None, None)
    distance = _mean_gap(expected, parent)
    parent_gap = _mean_gap(measured, parent)
    noise = max(noise, min(gap, parent_gap))
    distinct = distance > 0 and distance >= SEVERAL * noise
    margin = (parent_gap - gap) / distance if distinct else None
    verdict: Verdict = "failed"
    if sane and (proven or not distinct or gap < parent_gap):
        verdict = "passed" if proven or distinct else "indistinct"
    return ProbeReport(verdict, gap, parent_gap, distance, noise, margin)


def _mean_gap(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / max(len(left), 1)
