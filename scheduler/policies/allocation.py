"""Splits nodes between sampling and training (StreamRL, arXiv 2504.15930, algorithm 1). Pure.

Sampling and training of successive batches overlap, so a step takes as long as the slower of the two. On one site both draw on
the same nodes: of all x + y <= n the pair with the least max(T_gen(x), T_train(y)). Across two sites each has a pool of its own:
the slower stage keeps its whole pool, and the faster one uses the fewest nodes with which it is not slower. Of two equally fast
splits the cheaper is better, by the cost of a node's hardware.

The paper measures both times; here they are a model: engines' throughput (`throughput.py`) or points that were measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.policies.throughput import EngineModel


@dataclass(frozen=True, slots=True)
class Load:
    """A load that differs from the measured one, as factors."""

    length: float = 1.0
    """The factor of every reply's length."""
    training: float = 1.0
    """The factor of the training time per token."""


AS_MEASURED = Load()


class Stage(Protocol):
    """Seconds that sampling, or training, of one batch takes."""

    def seconds(self, nodes: int, load: Load) -> float:
        """Return the seconds on this many nodes, at least 1."""


@dataclass(frozen=True, slots=True)
class Points:
    """A stage that was measured at some numbers of nodes.

    Between two of these numbers node-seconds are interpolated linearly; beyond them they are constant.
    """

    measured: tuple[tuple[int, float], ...]
    """(nodes, seconds), by nodes, at least one."""
    trains: bool = False
    """True for the training stage, to which `Load.training` applies."""

    def seconds(self, nodes: int, load: Load) -> float:
        at = bisect_left(self.measured, (nodes, 0.0))
        right = self.measured[min(at, len(self.measured) - 1)]
        left = self.measured[max(at - 1, 0)]
        work = right[0] * right[1]
        if left[0] < nodes < right[0]:
            share = (nodes - left[0]) / (right[0] - left[0])
            work = left[0] * left[1] * (1 - share) + work * share
        elif nodes < right[0]:
            work = left[0] * left[1]
        return work / nodes * load.length * (load.training if self.trains else 1.0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Generation by StreamRL's latency of an instance, PTL(BS) * L * ceil(M / BS), with the time of a decode step as PTL.

    The time of the longest reply, sampled alone, is the lower bound, divided by the number of batches generated in parallel.
    """

    engine: EngineModel
    samples: int
    """Replies of a step."""
    reply: float
    """Mean tokens of a reply."""
    longest: float
    """Tokens of a step's longest reply."""
    prompt: float = 0.0
    """Mean tokens of the prompt."""
    engines: int = 1
    """Engines per node."""
    most: int = 256
    """Replies that an engine samples concurrently."""
    batches: int = 1
    """Batches that the longest reply may take: one more than the bound on staleness."""
    factor: float = 1.0
    """The measured time divided by the modeled one."""

    def seconds(self, nodes: int, load: Load) -> float:
        each = math.ceil(self.samples / (nodes * self.engines))
        running = min(each, self.most)
        reply, longest = self.reply * load.length, self.longest * load.length
        step_s = self.engine.step_s(running, running * (self.prompt + reply / 2))
        alone_s = self.engine.step_s(1, self.prompt + longest / 2)
        return self.factor * max(step_s * reply * math.ceil(each / running), alone_s * longest / self.batches)


@dataclass(frozen=True, slots=True)
class Training:
    """Forward and backward passes of a batch, divided evenly, and a fixed cost per step."""

    samples: int
    reply: float
    prompt: float
    token_s: float
    """Seconds for one token on one node."""
    fixed_s: float = 0.0

    def seconds(self, nodes: int, load: Load) -> float:
        tokens = self.samples * (self.prompt + self.reply * load.length)
        return tokens * self.token_s * load.training / nodes + self.fixed_s


@dataclass(frozen=True, slots=True)
class Hardware:
    """A kind of node. Speeds are relative to the node that the stages were measured on."""

    cost: float = 1.0
    generation: float = 1.0
    training: float = 1.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one kind in one place."""

    nodes: int
    hardware: Hardware = Hardware()


@dataclass(frozen=True, slots=True)
class Split:
    """The numbers of nodes that sample and that train."""

    rollout: int
    train: int
    generation_s: float
    training_s: float
    cost: float
    """GPUs of the nodes in use."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return max(self.generation_s, self.training_s)

    @property
    def order(self) -> tuple[float, float, int]:
        """The sort key: the least is best."""
        return self.step_s, self.cost, self.rollout


@dataclass(frozen=True, slots=True)
class Site:
    """The nodes of the two stages. `train` None: one pool, which they share."""

    generation: Stage
    training: Stage
    rollout: Pool
    train: Pool | None = None

    def split(self, rollout: int, train: int, load: Load = AS_MEASURED) -> Split:
        """Return the time and cost of this split, which need not be possible here (`allows`)."""
        trains = (self.train or self.rollout).hardware
        return Split(
            rollout,
            train,
            self.generation.seconds(rollout, load) / self.rollout.hardware.generation,
            self.training.seconds(train, load) / trains.training,
            rollout * self.rollout.hardware.cost + train * trains.cost,
        )

    def allows(self, rollout: int, train: int) -> bool:
        """Return true if the site has that many nodes."""
        if self.train is None:
            return min(rollout, train) >= 1 and rollout + train <= self.rollout.nodes
        return 1 <= rollout <= self.rollout.nodes and 1 <= train <= self.train.nodes

    def best(self, load: Load = AS_MEASURED) -> Split:
        """Return the best split; no other is better by `Split.order`. Raise ValueError if there are too few nodes."""
        if not self.allows(1, 1):
            raise ValueError("a split needs a node that samples and one that trains")
        training = self._training_records(load)
        counts = range(1, self.rollout.nodes + (self.train is not None))
        return min((self._best_with(x, training, load) for x in counts), key=lambda split: split.order)

    def best_with(self, rollout: int, load: Load = AS_MEASURED) -> Split:
        """Return the best split in which `rollout` nodes sample."""
        return self._best_with(rollout, self._training_records(load), load)

    def _best_with(self, rollout: int, training: Sequence[tuple[int, float]], load: Load) -> Split:
        """Return the fewest nodes that train as fast as `rollout` nodes sample; if none do, the fewest that are fastest."""
        most = self.train.nodes if self.train else self.rollout.nodes - rollout
        able = training[: bisect_left(training, most + 1, key=lambda record: record[0])]
        generation_s = self.split(rollout, 1, load).generation_s
        at = bisect_left(able, -generation_s, key=lambda record: -record[1])
        return self.split(rollout, able[min(at, len(able) - 1)][0], load)

    def _training_records(self, load: Load) -> list[tuple[int, float]]:
        most = self.train.nodes if self.train else self.rollout.nodes - 1
        return _records([self.split(1, y, load).training_s for y in range(1, most + 1)])


def _records(seconds: Sequence[float]) -> list[tuple[int, float]]:
    """Return (nodes, seconds) for each number of nodes that is faster than all smaller ones."""
    found: list[tuple[int, float]] = []
    for nodes, value in enumerate(seconds, 1):
        if not found or value < found[-1][1]:
            found.append((nodes, value))
    return found


def neighbors(site: Site, split: Split) -> list[Split]:
    """Return the splits that differ by one node, or by one that changes sides."""
    moves = [(-1, 1), (-1, 0), (0, -1), (0, 1), (1, 0), (1, -1)]
    pairs = [(split.rollout + x, split.train + y) for x, y in moves]
    return [site.split(x, y) for x, y in pairs if site.allows(x, y)]


SENSITIVITY: dict[str, Load] = {
    "length -20%": Load(length=0.8),
    "length +20%": Load(length=1.2),
    "training -20%": Load(training=0.8),
    "training +20%": Load(training=1.2),
}


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The value of a split under a load other than the one it was made for."""

    name: str
    chosen: Split
    best: Split
    """The best under this load."""

    @property
    def loss(self) -> float:
        """The share by which the chosen split is slower than the best."""
        return self.chosen.step_s / self.best.step_s - 1.0


def sensitivity(site: Site, split: Split) -> list[Sensitivity]:
    """Return the split under each load of `SENSITIVITY`."""
    return [
        Sensitivity(name, site.split(split.rollout, split.train, load), site.best(load))
        for name, load in SENSITIVITY.items()
    ]
