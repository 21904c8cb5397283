"""Does an engine run the version it should? Judged by its log-probabilities on tokens where version and parent differ most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["passed", "indistinct", "failed"]


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
    margin: float | None
    """(parent_gap - gap) / distance: 1 for the expected weights, -1 for the parent's."""

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self)


def judge(
    measured: Sequence[float],
    expected: Sequence[float],
    parent: Sequence[float],
    *,
    tolerance: float,
    noise_floor: float,
) -> ProbeReport:
    """Compares an engine's log-probabilities (nats, one per token) with those of a version and of its parent.

    An engine passes if it is within `tolerance` of the version and closer to it than to the parent. Versions that differ by less
    than `noise_floor` cannot be told apart: then the tolerance alone decides, and the verdict says `indistinct`. `parent` may be
    empty (the first version). Raises ValueError if the lengths differ.
    """
    gap = _mean_gap(measured, expected)
    if not parent:
        return ProbeReport("passed" if gap <= tolerance else "failed", gap, None, None, None)
    distance = _mean_gap(expected, parent)
    parent_gap = _mean_gap(measured, parent)
    if distance < noise_floor:
        verdict: Verdict = "indistinct" if gap <= tolerance else "failed"
        return ProbeReport(verdict, gap, parent_gap, distance, None)
    passed = gap <= tolerance and gap < parent_gap
    margin = (parent_gap - gap) / distance
    return ProbeReport("passed" if passed else "failed", gap, parent_gap, distance, margin)


def _mean_gap(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / max(len(left), 1)
