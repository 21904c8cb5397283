"""The behaviour that most policies share, of which each changes one thing.

Rollout and training are apart, every group that may start starts at once, each call goes where least is running, and after a
step all engines load the weights together while the trainer waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab import rules
from lab.simulate.entities import Layout
from scheduler.policies.staleflow import LedgerSettings
from scheduler.policies.staleness_base import StalenessRule

if TYPE_CHECKING:
    from lab.simulate.entities import Host, Sample
    from lab.simulate.scenario import Scenario
    from lab.simulate.world import World


class Plain:
    """A `world.Policy` without routing by length: any group that may start starts, any sample goes to the least loaded engine."""

    name = "plain"
    rule_name = "synchronous"
    stream = 0
    recompute = True
    ticks = False

    def layout(self, scenario: Scenario) -> Layout:
        """Rollout and training apart."""
        return Layout(rollout=scenario.gpus - scenario.train_gpus, train=scenario.train_gpus)

    def rule(self, scenario: Scenario) -> StalenessRule:
        """The rule of `rule_name`, under the scenario's bound; every group is trained as it is."""
        return rules.create(
            self.rule_name, LedgerSettings(eta=scenario.eta, batch=scenario.batch, min_members=1)
        )

    def on_room(self, world: World) -> None:
        """Starts what may start."""
        while world.room() and (group := world.start_group()):
            self.on_homeless(world, group.samples)

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """A later turn where the earlier ones are cached, all else where least is running; if no engine is open, wait."""
        for sample in samples:
            host = world.last_host(sample) or world.least_loaded()
            if host is None:
                world.hold(sample)
            else:
                world.route(sample, host)

    def on_left(self, world: World, calls: Sequence[tuple[Sample, int, int]]) -> None:
        """Nothing."""

    def on_opened(self, world: World, host: Host) -> None:
        """Nothing."""

    def on_asleep(self, world: World, host: Host) -> None:
        """Nothing."""

    def on_ready(self, world: World) -> None:
        """Trains."""
        world.train()

    def on_trained(self, world: World) -> None:
        """The trainer waits until every engine has the weights."""
        world.publish(blocked_s=world.transfers.collective_s)

    def on_published(self, world: World, version: int) -> None:
        """Every engine stops, loads, and goes on with what it had."""
        for host in world.open_hosts():
            world.sync(host, world.transfers.collective_s)

    def on_idle(self, world: World, host: Host) -> None:
        """Nothing."""

    def on_second(self, world: World) -> None:
        """Nothing."""
