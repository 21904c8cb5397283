"""Heddle: trajectories are placed as a whole, by how long they are predicted to be, and move while their tools work.

Source: Heddle (arXiv 2603.28101), its abstract. Trajectory-level scheduling: what a trajectory still takes is predicted anew as
it goes on, and those with the most before them come first (progressive priority). Placement: presorted, so that a long one is
slowed by few; a trajectory moves while a tool works, if that makes engines more even (opportunistic migration).
Here: trajectories that want an engine are sorted, the longest first, and each goes to the engine with the least predicted work
that has room; a later turn stays where its cache is, unless another engine has less work even with it, and then its cache
goes along in no time. What finds no room waits before the engines, the longest first.

Where this is not as the source says: its dynamic programme cuts the sorted trajectories into contiguous runs. With a ranker
that is wrong at times (it gets StreamRL's, `workload.RANKER_NOISE`) that trained about a sixth fewer tokens/s than the rule above
in three of four scenarios that are not in the grid, and 1 % more in the fourth; so it has the rule above.

Where the source is silent: it is about rollout alone, so batches are made by StaleFlow's ledger; weights are pushed to the
engines' hosts and loaded by all engines at once, and calls go on there; of a trajectory that is longer than predicted half of
what it has is expected again; log-probabilities are not computed again; a batch is taken in StreamRL's sixteen parts.

Left out: its adaptive resource manager, which gives long trajectories engines of more GPUs. Engines of a scenario are all of
one size, so it is without one of its three means here. Knobs: none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.simulate.baselines.plain import Plain
from lab.simulate.engine import HEADROOM
from lab.simulate.foresight import Foresight

if TYPE_CHECKING:
    from lab.simulate.entities import Host, Sample
    from lab.simulate.world import World


class Heddle(Plain):
    """The longest trajectory first, to the engine with the least predicted work."""

    name = "heddle"
    rule_name = "staleflow"
    stream = 16
    recompute = False
    ticks = True

    def __init__(self) -> None:
        self._foresight = Foresight()
        self._homes: dict[Sample, Host | None] = {}
        """The trajectories that are not over, and the engine of each: where it runs, or ran before its tool."""
        self._work: dict[Host, float] = {}
        """Tokens that are expected of each engine's trajectories, as of the last second and what has come since."""
        self._queue: list[Sample] = []
        """Those that wait, the longest last."""

    def on_room(self, world: World) -> None:
        """Groups that may start do."""
        samples: list[Sample] = []
        while world.room() and (group := world.start_group()):
            samples += group.samples
        if samples:
            self.on_homeless(world, samples)

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """The trajectories with the most before them come first."""
        self._homes.update({sample: self._homes.get(sample) for sample in samples})
        self._queue = sorted([*self._queue, *samples], key=self._rest)
        self._place(world)

    def on_left(self, world: World, calls: Sequence[tuple[Sample, int, int]]) -> None:
        """Learns how long trajectories are; there is room."""
        for sample, _, _ in calls:
            if sample.over and sample in self._homes:
                del self._homes[sample]
                self._foresight.learn(sum(turn.sampled for turn in sample.turns[: sample.at]))
        self._place(world)

    def on_opened(self, world: World, host: Host) -> None:
        """What waits may go there."""
        self._place(world)

    def on_trained(self, world: World) -> None:
        """The trainer pushes the weights to the engines' hosts and goes on."""
        world.publish(blocked_s=world.transfers.push_s, delay_s=world.transfers.delay_s)

    def on_published(self, world: World, version: int) -> None:
        """Every engine loads, and goes on with what it had."""
        for host in world.open_hosts():
            world.sync(host, world.transfers.pull_s)

    def on_second(self, world: World) -> None:
        """Predicts anew what each engine has before it."""
        self._work = dict.fromkeys(world.hosts, 0.0)
        for sample, home in self._homes.items():
            if home is not None:
                self._work[home] += self._rest(sample)
        self._place(world)

    def _place(self, world: World) -> None:
        """Sends what finds room, the longest first."""
        while self._queue:
            sample = self._queue[-1]
            host = None if sample.over else self._choice(world, sample)
            if host is None and not sample.over:
                return
            self._queue.pop()
            if host is None:
                continue
            home, rest = self._homes[sample], self._rest(sample)
            if home is not host:
                self._work[host] = self._work.get(host, 0.0) + rest
                if home is not None:
                    self._work[home] = self._work.get(home, 0.0) - rest
                    sample.carried = sample.cached_at == (home.number, host.version)
            self._homes[sample] = host
            world.route(sample, host)

    def _choice(self, world: World, sample: Sample) -> Host | None:
        room = [host for host in world.open_hosts() if _has_room(host, sample)]
        least = min(room, key=lambda host: (self._work.get(host, 0.0), host.engine.load), default=None)
        stays = world.last_host(sample)
        if stays is None or least is None:
            return least or stays
        even = self._work.get(stays, 0.0) <= self._work.get(least, 0.0) + self._rest(sample)
        return stays if even else least

    def _rest(self, sample: Sample) -> float:
        """Tokens that are expected of the trajectory from now on."""
        expected = self._foresight.expect(sample.predicted)
        return float(max(expected - sample.tokens, sample.tokens / 2, 1.0))


def _has_room(host: Host, sample: Sample) -> bool:
    engine = host.engine
    costs, n = engine.costs, engine.load
    fits = engine.kv + sample.context + HEADROOM * (n + 1) <= costs.capacity
    return not n or (n < costs.slots and fits)
