"""Synchronous and colocated: all GPUs generate a batch, then all train on it, then all generate the next. verl's default.

Source: HybridFlow (arXiv 2409.19256); volcengine/verl, verl/trainer/ppo/ray_trainer.py, `fit`: generate, compute the old
log-probabilities, update the actor, load its weights into the engines. At most one batch is live; staleness is 0.

Left out: reward and reference models (the figures of verl's recipe have neither), and verl's assignment of prompts to
engines before the batch begins: calls go where least is running, which favours it. Knobs: none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.simulate.baselines.plain import Plain
from lab.simulate.entities import Layout

if TYPE_CHECKING:
    from lab.simulate.scenario import Scenario
    from lab.simulate.world import World


class SyncColocated(Plain):
    """Everybody does the same thing at the same time."""

    name = "sync_colocated"

    def layout(self, scenario: Scenario) -> Layout:
        """All GPUs for both."""
        return Layout(rollout=0, train=0, both=scenario.gpus)

    def on_ready(self, world: World) -> None:
        """The engines go to sleep, then the trainer begins."""
        awake = world.open_hosts()
        if awake:
            world.claim(awake, world.transfers.to_train_s)
        elif all(host.state == "asleep" for host in world.hosts):
            world.train()

    def on_trained(self, world: World) -> None:
        """The engines wake up with the new weights."""
        world.publish(blocked_s=0.0)
        world.release(world.hosts, world.transfers.to_rollout_s)

    def on_published(self, world: World, version: int) -> None:
        """They have them when they wake up."""
