"""Runs of policies over scenarios and seeds, and their figures with confidence intervals.

Every policy gets the same workload for a seed, so a ratio between two policies is taken seed by seed. An interval is 95 %
by Student's t over the seeds; one seed has none. Every figure is simulated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.simulate.errors import SimulationError
from lab.simulate.scenario import Scenario
from lab.simulate.upper_bound import UpperBound
from lab.simulate.world import Policy, World

FIGURES = (
    "tokens_per_s",
    "bounded_tokens_per_s",
    "seconds_per_batch",
    "idle_share",
    "rollout_share",
    "train_share",
    "switching_share",
    "staleness_mean",
    "staleness_max",
    "wasted_share",
    "prefilled_per_token",
    "ub_fraction",
    "useful_share",
)
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a policy in a scenario, seed by seed."""

    scenario: str
    policy: str
    runs: tuple[dict[str, Any], ...]

    def values(self, figure: str) -> list[float]:
        """Return a figure's value for each seed."""
        return [float(run[figure]) for run in self.runs]

    def estimate(self, figure: str) -> Estimate:
        """Return a figure's estimate over the seeds."""
        return Estimate.of(self.values(figure))

    def over(self, other: Outcome) -> Estimate:
        """Return trained tokens/s as a multiple of another policy's, seed by seed."""
        pairs = zip(self.values("tokens_per_s"), other.values("tokens_per_s"), strict=True)
        return Estimate.of([own / others for own, others in pairs])

    def to_json(self) -> dict[str, Any]:
        figures = {figure: self.estimate(figure).to_json() for figure in FIGURES}
        return {"scenario": self.scenario, "policy": self.policy, "seeds": len(self.runs), **figures}


def run(
    scenario: Scenario,
    policies: Mapping[str, Callable[[], Policy]],
    seeds: Iterable[int],
    begin: Callable[[str], None] = lambda _what: None,
) -> list[Outcome]:
    """Run each policy with each seed. `begin` gets the name of each run. Raise SimulationError."""
    outcomes = []
    bounds = {seed: UpperBound.of(scenario, seed) for seed in seeds}
    for name, policy in policies.items():
        runs = []
        for seed, bound in bounds.items():
            begin(f"{scenario.name}: {name}, seed {seed}")
            runs.append(simulate(scenario, policy(), seed, bound))
        outcomes.append(Outcome(scenario.name, name, tuple(runs)))
    return outcomes


def simulate(
    scenario: Scenario, policy: Policy, seed: int, bound: UpperBound | None = None
) -> dict[str, Any]:
    """Return the figures of one run, and how near it is to the upper bound. Raise SimulationError.

    `ub_fraction`: trained tokens/s over the bound's. `useful_share`: the part of all GPU time that the trained tokens need at
    least, however many GPU seconds were busy. `bound`: the scenario's with that seed, if known.
    """
    meter = World(scenario, policy, scenario.workload(seed)).run()
    accounted = sum(meter.tokens) + meter.wasted + meter.underway
    if accounted != meter.sampled:
        raise SimulationError(f"{meter.sampled} tokens were sampled and {accounted} are accounted for")
    figures, bound = meter.figures(), bound or UpperBound.of(scenario, seed)
    rate = figures["tokens_per_s"]
    nearness = {
        "ub_fraction": rate / bound.tokens_per_s,
        "useful_share": rate * bound.busy_s / bound.tokens,
    }
    return figures | nearness
