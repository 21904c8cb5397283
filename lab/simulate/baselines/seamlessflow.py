"""SeamlessFlow: nodes that train are lent to rollout while they have nothing to train, by tags.

Source: SeamlessFlow (arXiv 2508.11553; papers.md section 1). Nodes tagged `rollout` generate all the time; nodes tagged
`train` and `rollout` generate until a batch is there, are recalled (what they generate goes on elsewhere: partial
rollout), train, and are returned after the step. Its sources give no rule of admission; it gets verl's window under the
scenario's bound. Engines that did not train load the weights as in every partial rollout: stop, load, go on.

Left out: the trajectory manager (it costs no GPU). The share of nodes with both tags is not in its sources: here it is
the scenario's trainer share, so that the GPUs that train are those of every other policy. Log-probabilities are those
that were recorded. Knobs: tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.simulate.baselines.plain import Plain
from lab.simulate.baselines.verl_async import window
from lab.simulate.entities import Layout

if TYPE_CHECKING:
    from lab.simulate.scenario import Scenario
    from lab.simulate.world import World
    from scheduler.policies.staleness_base import StalenessRule


class SeamlessFlow(Plain):
    """Train nodes that are never idle while there is something to generate."""

    name = "seamlessflow"
    recompute = False

    def rule(self, scenario: Scenario) -> StalenessRule:
        """verl's window."""
        return window(scenario)

    def layout(self, scenario: Scenario) -> Layout:
        """The nodes that train have both tags."""
        return Layout(rollout=scenario.gpus - scenario.train_gpus, train=0, both=scenario.train_gpus)

    def on_ready(self, world: World) -> None:
        """Recalls the lent nodes; trains when they are there."""
        shared = [host for host in world.hosts if host.shared]
        if awake := [host for host in shared if host.state == "open"]:
            world.claim(awake, world.transfers.to_train_s)
        elif all(host.state == "asleep" for host in shared):
            world.train()

    def on_trained(self, world: World) -> None:
        """Returns the nodes with the new weights, unless the next batch is there already."""
        world.publish(blocked_s=world.transfers.collective_s)
        if not world.rule.complete(world.rule.next_buffer):
            shared = [host for host in world.hosts if host.state == "asleep"]
            world.release(shared, world.transfers.to_rollout_s)
