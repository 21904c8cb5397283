"""DORA: several versions sample concurrently, each on engines of its own, and no trajectory ever changes its version.

Source: DORA (arXiv 2604.26256), its abstract: multi-version streaming rollout, where every trajectory is sampled by one version
to its end (so what a call has in the cache is good in every engine of that version), none is dropped, and staleness is bounded;
an orchestrator divides the engines among the versions again and again, and moves calls without computing their prompts again.
Here: when a version is published, and once a second, the engines are divided among the versions that have calls by the number of
these; engines beyond a version's share give their calls to the others of it and load the newest version; within a version calls
move until all its engines have the same number.

Where the source is silent: batches are made by StaleFlow's ledger; a call of an older version counts `LATE` times as much, which
was best for it; a cache moves in no time; the trainer takes groups as they come, as headgate's does. Roles of GPUs do not change
between rollout and training. Where there are fewer engines than versions, a call continues under the next newer version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lab.simulate.entities import Host, Sample
from lab.simulate.world import Policy, World

LATE = 4.0
"""The weight of a call of an older version, where engines are divided."""


class Dora(Policy):
    """Several versions at the same time, each with a share of the engines."""

    name = "dora"
    stream = 64
    ticks = True

    def __init__(self) -> None:
        self._live: Counter[int] = Counter()
        """The samples of each version that are not over."""

    def on_room(self, world: World) -> None:
        """Start groups, and give engines to the newest version."""
        samples: list[Sample] = []
        while world.room() and (group := world.start_group()):
            samples += group.samples
            self._live[group.version] += len(group.samples)
        if samples:
            self._divide(world)
            self.on_homeless(world, samples)

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """Route a sample to where its earlier turns are, else to where least is running under its version."""
        for sample in samples:
            host = world.last_host(sample) or _least(world, sample.group.version)
            if host is None:
                world.hold(sample)
            else:
                world.route(sample, host)

    def on_left(self, world: World, calls: Sequence[tuple[Sample, int, int]]) -> None:
        for sample, _, _ in calls:
            if sample.over:
                self._live[sample.group.version] -= 1

    def on_trained(self, world: World) -> None:
        """Publish without a pause of the trainer."""
        world.publish(blocked_s=0.0, delay_s=world.transfers.delay_s)

    def on_published(self, world: World, version: int) -> None:
        self._divide(world)

    def on_idle(self, world: World, host: Host) -> None:
        """Let an engine whose version has no more calls for it load the newest."""
        if host.version < world.arrived:
            self._divide(world)

    def on_second(self, world: World) -> None:
        """Divide the engines, and even out the calls of each version."""
        self._divide(world)
        for hosts in _by_version(world.open_hosts()).values():
            _even_out(world, hosts)

    def _divide(self, world: World) -> None:
        """Take the engines from older versions that are beyond their share, those with the fewest calls first."""
        newest = world.arrived
        weights = {v: n * (LATE if v < newest else 1.0) for v, n in self._live.items() if n > 0}
        weights.setdefault(newest, 0.0)
        total = sum(weights.values())
        for version, hosts in _by_version(world.open_hosts()).items():
            if version >= newest:
                continue
            weight = weights.get(version, 0.0)
            share = max(round(len(world.hosts) * weight / total), 1) if weight else 0
            hosts.sort(key=_load)
            beyond = max(len(hosts) - share, 0)
            for host in hosts[:beyond]:
                _empty(world, host, hosts[beyond:])
                world.sync(host, world.transfers.pull_s)


def _by_version(hosts: Sequence[Host]) -> dict[int, list[Host]]:
    found: dict[int, list[Host]] = {}
    for host in hosts:
        found.setdefault(host.version, []).append(host)
    return found


def _least(world: World, version: int) -> Host | None:
    """Return the open engine with the fewest calls of the oldest version that is not older; None while one is loading."""
    legal = [host for host in world.open_hosts() if host.version >= version]
    return min(legal, key=lambda host: (host.version, host.engine.load), default=None)


def _empty(world: World, host: Host, others: Sequence[Host]) -> None:
    """Give an engine's calls to the others of its version, with what they have in the cache."""
    for call in list(world.look(host).calls()) if others else []:
        world.move(call.owner, min(others, key=_load), carry=True)


def _even_out(world: World, hosts: Sequence[Host]) -> None:
    while len(hosts) > 1:
        least, most = min(hosts, key=_load), max(hosts, key=_load)
        if _load(most) - _load(least) < 2:
            return
        world.move(next(reversed(list(world.look(most).calls()))).owner, least, carry=True)


def _load(host: Host) -> int:
    return host.engine.load
