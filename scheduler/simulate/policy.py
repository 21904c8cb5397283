"""The seam between a simulated cluster and what decides in it.

The world tells a policy what happened; the policy answers by calling the world's verbs (`world.py`):

- groups: `start_group()`, and what to do with its samples: `route(sample, engine)` or `hold(sample)`;
- engines: `sync(engine, seconds)`, `move(sample, engine)`, `give_back(sample)`, `look(engine)`;
- nodes: `claim(engines, seconds)`, `release(engines, seconds)`;
- the trainer: `train()`, `publish(blocked_s)`.

Which groups may start and which batch they are trained in is the rule's (`scheduler.policies.rules`): the bound on
staleness is the same state machine here and in the gateway. A policy sees lengths only as `sample.predicted`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from scheduler.policies.rules import StalenessRule

if TYPE_CHECKING:
    from scheduler.simulate.scenario import Scenario
    from scheduler.simulate.world import Host, Sample, World


@dataclass(frozen=True, slots=True)
class Layout:
    """The split of GPUs. Engines on GPUs of both kinds sleep while the trainer has them."""

    rollout: int
    train: int
    both: int = 0

    @property
    def train_gpus(self) -> int:
        """On which a step is computed."""
        return self.train + self.both


class Policy(Protocol):
    """A scheduling policy: the simulator calls it at every event."""

    name: str
    stream: int
    """The trainer begins with a batch before it is whole, and takes it in so many parts; 0: only when it is whole."""
    recompute: bool
    """The trainer computes the log-probabilities of what it trains once more."""
    ticks: bool
    """True if the policy wants `on_second`."""

    def layout(self, scenario: Scenario) -> Layout:
        """Divides the scenario's GPUs."""

    def rule(self, scenario: Scenario) -> StalenessRule:
        """The rule that bounds staleness."""

    def on_room(self, world: World) -> None:
        """The rule may let groups start."""

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """Samples want an engine: they were just started, were given back, had their tool's answer, or an engine opened again
        while they were held."""

    def on_left(self, world: World, calls: Sequence[tuple[Sample, int, int]]) -> None:
        """Calls want no engine any more: their turn has ended, or their sample is given up. The sample, the number of its turn,
        and the tokens of its context. Told before anything else that follows from it."""

    def on_opened(self, world: World, host: Host) -> None:
        """An engine has loaded weights, or has woken up."""

    def on_asleep(self, world: World, host: Host) -> None:
        """An engine that was claimed sleeps."""

    def on_ready(self, world: World) -> None:
        """The trainer waits, and has something to train: `train()` now, or once the nodes are there."""

    def on_trained(self, world: World) -> None:
        """A step was made: `publish()`."""

    def on_published(self, world: World, version: int) -> None:
        """Newer weights were published."""

    def on_idle(self, world: World, host: Host) -> None:
        """An open engine has nothing to do."""

    def on_second(self, world: World) -> None:
        """A second has passed."""
