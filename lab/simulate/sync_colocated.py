"""Synchronous and colocated: all GPUs generate a batch, then all train on it, then all generate the next. verl's default.

Source: HybridFlow (arXiv 2409.19256); volcengine/verl, verl/trainer/ppo/ray_trainer.py, `fit`. At most one batch is live;
staleness is 0. Calls go where least is running, which is better than verl's assignment before the batch begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.simulate.entities import Layout, Sample
from lab.simulate.scenario import Scenario
from lab.simulate.world import Policy, World
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_state import LedgerSettings


class SyncColocated(Policy):
    """All GPUs do the same thing at the same time."""

    name = "sync_colocated"

    def layout(self, scenario: Scenario) -> Layout:
        return Layout(rollout=0, train=0, both=scenario.gpus)

    def rule(self, scenario: Scenario) -> StaleFlow:
        return StaleFlow(LedgerSettings(0, scenario.batch, min_members=1))

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """Route a later turn to where the earlier ones are cached, and all else to where least is running."""
        for sample in samples:
            host = world.last_host(sample)
            host = host or min(world.open_hosts(), key=lambda host: host.engine.load, default=None)
            if host is None:
                world.hold(sample)
            else:
                world.route(sample, host)

    def on_ready(self, world: World) -> None:
        """Put the engines to sleep, then train."""
        awake = world.open_hosts()
        if awake:
            world.claim(awake, world.transfers.to_train_s)
        elif all(host.state == "asleep" for host in world.hosts):
            world.train()

    def on_trained(self, world: World) -> None:
        """Wake the engines with the new weights."""
        world.publish(blocked_s=0.0)
        world.release(world.hosts, world.transfers.to_rollout_s)
