"""StreamRL: one step off policy, samples streamed to the trainer, weights sent beside the training, long replies on engines
of their own.

Source: StreamRL (arXiv 2504.15930; papers.md section 2). Asynchronous form: batch b + 1 is generated while batch b is
trained, and the weights travel while the next step is computed (`publish` with a delay and no wait). The trainer begins
as soon as enough samples have come (dynamic-batch pipelining; here in sixteenths of a batch). A ranker predicts which
fifth of the prompts is longest (recall 0.87: `workload.RANKER_NOISE`); those go to engines of their own. The split of the
engines is found by enumeration with the latency model PTL(BS) * L * ceil(M / BS), L the P90 of the lengths for the tail
and the P50 for the rest; engines work side by side, so the greater of the two counts (one note writes the sum). Inside an
engine the longest begin first.

Left out: allocation of the GPUs (its Algorithm 1 is the scenario's balanced split) and growth by whole nodes while it runs.
Log-probabilities: no source says that the trainer computes them again, so it does not. Knobs: alpha = 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

from lab.simulate.baselines.one_step import OneStep

if TYPE_CHECKING:
    from lab.simulate.engine import EngineCosts
    from lab.simulate.entities import Host, Sample
    from lab.simulate.scenario import Scenario
    from lab.simulate.world import World

ALPHA = 0.2
"""The share of prompts that is taken to be the tail."""


class StreamRL(OneStep):
    """One step off, streamed, skew-aware."""

    name = "streamrl"
    stream = 16
    recompute = False

    def on_room(self, world: World) -> None:
        """Starts what may start as one, so that the longest of all begin first."""
        for host in world.open_hosts() if world.room() else []:
            self.on_idle(world, host)
        samples: list[Sample] = []
        while world.room() and (group := world.start_group()):
            samples += group.samples
        if samples:
            self.on_homeless(world, samples)

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """The predicted tail to the first engines, the rest to the others, the longest first, to where least is running."""
        for sample in samples:
            if host := world.last_host(sample):
                world.route(sample, host)
        samples = [sample for sample in samples if sample.host is None]
        newest = max((sample.group.version for sample in samples), default=0)
        hosts = [host for host in world.open_hosts() if host.version >= newest]
        if not hosts or any(host.state == "loading" for host in world.hosts):
            for sample in samples:  # the split is of all engines, so all must be there
                world.hold(sample)
            return
        ranked = sorted(samples, key=lambda sample: -sample.predicted)
        tail = [sample for sample in ranked if sample.predicted >= 1 - ALPHA]
        alone = split(len(hosts), len(tail), len(ranked) - len(tail), world.scenario)
        _deal(world, tail, hosts[:alone] or hosts)
        _deal(world, ranked[len(tail) :], hosts[alone:] or hosts)

    def on_trained(self, world: World) -> None:
        """Nobody waits for the weights."""
        world.publish(blocked_s=0.0, delay_s=world.transfers.overlapped_s)

    def on_idle(self, world: World, host: Host) -> None:
        """The weights are there already: it takes them over from its host's memory."""
        if host.version < world.arrived and not host.engine.load:
            world.sync(host, world.transfers.pull_s)


def split(engines: int, tail: int, rest: int, scenario: Scenario) -> int:
    """How many engines the tail gets: the least of both groups' latencies, the slower group counting, then their sum."""
    if not tail or not rest or engines < 2:
        return engines if not rest else 0
    costs, (median, long) = scenario.engine, scenario.contexts

    def latency(alone: int) -> tuple[float, float]:
        both = _latency(tail, alone, long, costs), _latency(rest, engines - alone, median, costs)
        return max(both), sum(both)

    return min(range(1, engines), key=latency)


def _latency(samples: int, engines: int, length: float, costs: EngineCosts) -> float:
    each = math.ceil(samples / engines)
    size = max(min(each, costs.slots, int(costs.capacity / length)), 1)
    return costs.model.step_s(size, size * length / 2) * length * each / size


def _deal(world: World, samples: Sequence[Sample], hosts: Sequence[Host]) -> None:
    """Each to the host with the fewest calls."""
    loads = [(host.engine.load, host.number) for host in hosts]
    heapify(loads)
    for sample in samples:
        load, number = loads[0]
        world.route(sample, world.hosts[number])
        heapreplace(loads, (load + 1, number))
