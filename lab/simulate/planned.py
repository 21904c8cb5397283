"""headgate's policy with the GPUs divided as `scheduler plan` does: by `scheduler.policies.allocation` (StreamRL's algorithm 1).

The profile is the mean of the first 64 groups and the scenario's facts: hardware, longest reply, bound on staleness. The plan is
used where more nodes are to train than the scenario has: these are lent while they have nothing to do, but no other node can
ever train.

Two corrections apply to `allocation.Sampling`'s time of a batch's longest reply. It may take as long as eta + 1 batches. And it
does not run alone from the beginning: its steps take longer, by the share `SHARED` of the steps of a full batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.simulate.combined import Combined
from lab.simulate.scenario import Scenario
from scheduler.policies.allocation import Load, Pool, Sampling, Site

SHARED = 0.25


class Planned(Combined):
    """The combined policy with the split that the planner suggests."""

    name = "combined_planned"

    def train_gpus(self, scenario: Scenario) -> int:
        """Return the planned number of training GPUs, but no fewer than the scenario's."""
        return max(split(scenario) * scenario.engine_gpus, scenario.train_gpus)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The time of sampling a batch, by number of engines."""

    scenario: Scenario

    def seconds(self, nodes: int, load: Load) -> float:
        scenario, model = self.scenario, self.scenario.engine.model
        calls, reply = scenario.batch * scenario.group, scenario.sampled_mean
        prompt, longest = scenario.contexts_mean - reply, scenario.lengths.longest
        batch_s = Sampling(model, calls, reply, 0, prompt, most=scenario.engine.slots).seconds(nodes, load)
        running = min(math.ceil(calls / nodes), scenario.engine.slots)
        full_s, alone_s = model.step_s(running, running * (prompt + reply / 2)), model.step_s(1, longest / 2)
        return max(batch_s, longest * (alone_s + SHARED * (full_s - alone_s)) / (scenario.eta + 1))


@dataclass(frozen=True, slots=True)
class _Training:
    """The time of training a batch, by the GPUs in engines' worth."""

    scenario: Scenario

    def seconds(self, nodes: int, load: Load) -> float:
        """Return the seconds of a step. The plan needs no other load."""
        scenario = self.scenario
        tokens = scenario.batch * scenario.group * scenario.contexts_mean
        trainer = scenario.trainer
        return trainer.seconds(tokens, nodes * scenario.engine_gpus) + trainer.step_s


def split(scenario: Scenario) -> int:
    """Return how many engines' worth of GPUs train."""
    engines = scenario.gpus // scenario.engine_gpus
    return Site(_Sampling(scenario), _Training(scenario), Pool(engines)).best().train
