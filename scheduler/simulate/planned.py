"""headgate's policy with the GPUs divided as `scheduler plan` would: by `scheduler.policies.allocation` (StreamRL's algorithm 1).

The split of a scenario is what every baseline keeps; it is given, and not the best for any. A cluster whose owner has run
`scheduler plan` has another, so this is a policy of its own beside `combined`, and is reported apart. The profile to plan by is
the mean of the first 64 groups, and what the scenario says: hardware, longest reply, bound on staleness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.policies.allocation import Load, Pool, Sampling, Site
from scheduler.simulate.combined import Combined

if TYPE_CHECKING:
    from scheduler.simulate.scenario import Scenario


class Planned(Combined):
    """See `policy.Policy`."""

    name = "combined_planned"

    def train_gpus(self, scenario: Scenario) -> int:
        """As planned; GPUs that neither side would need sample."""
        return split(scenario) * scenario.engine_gpus


@dataclass(frozen=True, slots=True)
class _Training:
    """Training a batch, on so many engines' worth of GPUs."""

    scenario: Scenario

    def seconds(self, nodes: int, load: Load) -> float:
        """See `allocation.Stage`. The plan asks for no other load."""
        scenario = self.scenario
        tokens = scenario.batch * scenario.group * scenario.contexts_mean
        trainer = scenario.trainer
        return trainer.seconds(tokens, nodes * scenario.engine_gpus, False) + trainer.step_s


def split(scenario: Scenario) -> int:
    """How many engines' worth of GPUs train.

    A reply may take as long as eta + 1 batches do: that share of the longest is what one batch must have time for.
    """
    generation = Sampling(
        engine=scenario.engine.model,
        samples=scenario.batch * scenario.group,
        reply=scenario.sampled_mean,
        longest=scenario.lengths.longest / (scenario.eta + 1),
        prompt=scenario.contexts_mean - scenario.sampled_mean,
        most=scenario.engine.slots,
    )
    engines = scenario.gpus // scenario.engine_gpus
    return Site(generation, _Training(scenario), Pool(engines)).best().train
