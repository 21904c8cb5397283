"""One step off policy: batch b + 1 is generated while batch b is trained.

Source: verl's recipe one_step_off_policy (volcengine/verl, recipe/one_step_off_policy/ray_trainer.py): wait until batch b
is generated, load the newest weights into the engines, begin batch b + 1, train batch b. Staleness 1, whatever the
scenario's eta.

An engine loads the weights when its last call of the batch ended (`on_idle`); no call is interrupted. Left out: the
trainer waits for that transfer in the recipe, here it does not, which favours it. Knobs: the split, which is the
scenario's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.simulate.baselines.plain import Plain

if TYPE_CHECKING:
    from lab.simulate.entities import Host, Sample
    from lab.simulate.world import World


class OneStep(Plain):
    """The next batch, once the one before it is generated."""

    name = "one_step"
    rule_name = "one_step"

    def on_room(self, world: World) -> None:
        """Samples that may start do, after engines that have nothing to do began to load."""
        if world.room():
            for host in world.open_hosts():
                self.on_idle(world, host)
        super().on_room(world)

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """Samples go where least is running, but to no engine that runs an older version than their group's."""
        for sample in samples:
            host = world.last_host(sample) or world.least_loaded()
            if host is None or host.version < sample.group.version:
                world.hold(sample)
            else:
                world.route(sample, host)

    def on_trained(self, world: World) -> None:
        """The trainer goes on."""
        world.publish(blocked_s=0.0)

    def on_published(self, world: World, version: int) -> None:
        """Engines without calls load; the others when they have none."""
        for host in world.open_hosts():
            self.on_idle(world, host)

    def on_idle(self, world: World, host: Host) -> None:
        """The idle engine loads the newest weights, if it has not."""
        if host.version < world.arrived and not host.engine.load:
            world.sync(host, world.transfers.collective_s)
