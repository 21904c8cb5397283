"""Runs of policies over scenarios and seeds, and their figures with confidence intervals.

Every policy gets the same workload for a seed. An interval is 95 % by Student's t over the seeds; one seed has none. Every figure
is simulated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lab.simulate.combined import Combined
from lab.simulate.dora import Dora
from lab.simulate.errors import SimulationError
from lab.simulate.planned import Planned
from lab.simulate.scenario import Scenario
from lab.simulate.sync_colocated import SyncColocated
from lab.simulate.world import Policy, World

POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (SyncColocated, Dora, Combined, Planned)
}
"""By name. A policy has the state of one run."""
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95 % on both sides, by degrees of freedom from 1 on; beyond, the normal's 1.96 is near enough."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and half the width of its interval."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate from at least one value."""
        if len(values) == 1:
            return cls(values[0], 0.0)
        t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 1.96
        return cls(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values)))

    def to_json(self) -> dict[str, float]:
        return {"mean": self.mean, "ci95": self.half}


def estimates(scenario: Scenario, policy: str, seeds: Iterable[int]) -> dict[str, Estimate]:
    """Return the figures of a policy over the seeds. Raise SimulationError."""
    runs = [simulate(scenario, POLICIES[policy](), seed) for seed in seeds]
    return {figure: Estimate.of([run[figure] for run in runs]) for figure in runs[0]}


def simulate(scenario: Scenario, policy: Policy, seed: int) -> dict[str, Any]:
    """Return the figures of one run. Raise SimulationError."""
    meter = World(scenario, policy, scenario.workload(seed)).run()
    accounted = sum(meter.tokens) + meter.wasted + meter.underway
    if accounted != meter.sampled:
        raise SimulationError(f"{meter.sampled} tokens were sampled and {accounted} are accounted for")
    return meter.figures()
