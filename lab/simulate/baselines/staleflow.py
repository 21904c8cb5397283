"""StaleFlow: a ledger of buffers, throughput-aware routing, engines that fetch weights when they are under-used, migration.

Source: StaleFlow (arXiv 2601.12784; papers.md section 3, from its authors' documents and code). Admission is its ledger
(`policies/staleflow.py`). Samples wait at the coordinator, the oldest version first; one goes to the engine that gains
most by it in tokens a second (T = n / (k1 kv + max(k2, k3 n) + k4)), and only if that is more than `MU` of what an empty
engine would gain, or the engine is empty. An engine takes no sample of a group that was started under a newer version
than it runs. Weights lie in a parameter server in host memory: the trainer pushes and goes on; an engine pulls when it
runs at most `UNDER` calls (or, by another of its triggers, samples less than `UNDER_RATE` of what it would with every slot full,
has less than `UNDER_CACHE` of its cache in use, or would gain enough by a sample that is too new for it) and nothing waits that
it may take. The weights first travel to the engines' hosts, while neither waits. Its calls go on there, prefilled again. When
nothing is pulled in a tick, calls move from the slowest engine if the fastest samples `TRIGGER` times as fast for a call, until
that is `STOP`. A tick is a second.

Left out: redundant groups and members (they train on shorter replies, so tokens/s would not compare), filters, its
speculative state (a snapshot is never stale here). Log-probabilities: no source says that they are computed again, so
they are not. Knobs: the trigger of a pull, UNDER = 2, TRIGGER = 2.0 and STOP = 1.2 (its documents' examples), MU, UNDER_RATE and
UNDER_CACHE (no values are given: 0.1 each)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from lab.simulate.baselines.plain import Plain

if TYPE_CHECKING:
    from lab.simulate.entities import Host, Sample
    from lab.simulate.world import World

UNDER, TRIGGER, STOP, MU = 2, 2.0, 1.2, 0.1
UNDER_RATE = UNDER_CACHE = 0.1
Trigger = Literal["running", "throughput", "cache", "queue"]
"""The sign by which an engine counts as under-used (the module's docstring has all four)."""


class StaleFlow(Plain):
    """The whole of it, without redundancy."""

    name = "staleflow"
    rule_name = "staleflow"
    recompute = False
    ticks = True

    def __init__(self, trigger: Trigger = "running") -> None:
        self._trigger = trigger
        self._queue: dict[int, deque[Sample]] = {}
        """The samples that wait at the coordinator, by the version of their group."""

    def on_room(self, world: World) -> None:
        """Samples that may start wait at the coordinator, and are routed at once if they can be."""
        fresh: list[Sample] = []
        while world.room() and (group := world.start_group()):
            fresh += group.samples
        if fresh:
            self._wait(fresh)
            self._route(world)

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """A later turn goes where the earlier ones are cached, if there is room; all else waits for the tick."""
        rest = []
        for sample in samples:
            host = world.last_host(sample)
            if host is not None and not host.engine.waiting:
                world.route(sample, host)
            else:
                rest.append(sample)
        self._wait(rest)

    def on_trained(self, world: World) -> None:
        """The trainer pushes into host memory and goes on."""
        world.publish(blocked_s=world.transfers.push_s, delay_s=world.transfers.delay_s)

    def on_published(self, world: World, version: int) -> None:
        """Engines that have little to do pull."""
        self._pull(world, world.open_hosts())

    def on_idle(self, world: World, host: Host) -> None:
        """The idle engine takes samples that wait, or pulls."""
        self._route(world, [host])
        self._pull(world, [host])

    def on_second(self, world: World) -> None:
        """Routes, pulls, and moves calls if nothing pulled."""
        self._route(world)
        hosts = world.open_hosts()
        if not self._pull(world, hosts):
            _balance(world, hosts)

    def _wait(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._queue.setdefault(sample.group.version, deque()).append(sample)

    def _route(self, world: World, hosts: Sequence[Host] | None = None) -> None:
        """Sends what it can, the oldest version first."""
        if not self._queue:
            return
        fleet = _Fleet(world, world.open_hosts() if hosts is None else hosts)
        for version in sorted(self._queue):
            queue = self._queue[version]
            while queue:
                if not queue[0].over:
                    host = fleet.best(queue[0])
                    if host is None:
                        return
                    world.route(queue[0], host)
                queue.popleft()
            del self._queue[version]

    def _pull(self, world: World, hosts: Sequence[Host]) -> bool:
        """Under-used engines load the newest weights; whether any did."""
        needed = min(self._queue, default=None)
        pulled = False
        for host in hosts:
            old = host.state == "open" and host.version < world.arrived
            takes = needed is not None and needed <= host.version
            if old and not takes and self._under_used(world, host, needed):
                world.sync(host, world.transfers.pull_s)
                pulled = True
        return pulled

    def _under_used(self, world: World, host: Host, needed: int | None) -> bool:
        engine = host.engine
        model, slots, idle = engine.costs.model, engine.costs.slots, engine.load <= UNDER
        match self._trigger:
            case "running":
                return idle
            case "throughput":
                full = model.rate(
                    slots, min(engine.kv / max(engine.running, 1) * slots, engine.costs.capacity)
                )
                return idle or engine.rate() < UNDER_RATE * full
            case "cache":
                return idle or engine.kv < UNDER_CACHE * engine.costs.capacity
            case "queue":
                if needed is None or needed > world.arrived:
                    return idle
                length = self._queue[needed][0].call.context
                gain = model.rate(engine.load + 1, engine.kv + length) - model.rate(engine.load, engine.kv)
                return idle or gain > MU * model.alone(length)


class _Fleet:
    """Open engines as arrays: how many calls each has, and how many tokens in its cache."""

    def __init__(self, world: World, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._model = world.scenario.engine.model
        self._slots, self._capacity = world.scenario.engine.slots, world.scenario.engine.capacity
        self._n = np.array([host.engine.load for host in hosts], dtype=float)
        self._kv = np.array([host.engine.kv for host in hosts], dtype=float)
        self._version = np.array([host.version for host in hosts])

    def best(self, sample: Sample) -> Host | None:
        """Where the sample adds most; None if nowhere enough. Books it there."""
        if not self._hosts:
            return None
        length = sample.call.context
        gain = self._rate(self._n + 1, self._kv + length) - self._rate(self._n, self._kv)
        legal = (self._version >= sample.group.version) & (self._n < self._slots)
        legal &= (self._kv + length < self._capacity) | (self._n == 0)
        gain = np.where(legal, gain, -np.inf)
        at = int(np.argmax(gain))
        enough = gain[at] > MU * self._model.alone(length) or (legal[at] and self._n[at] == 0)
        if not enough:
            return None
        self._n[at] += 1
        self._kv[at] += length
        return self._hosts[at]

    def _rate(self, n: np.ndarray, kv: np.ndarray) -> np.ndarray:
        model = self._model
        return n / (model.k1 * kv + np.maximum(model.k2, model.k3 * n) + model.k4)


def _balance(world: World, hosts: Sequence[Host]) -> None:
    """Moves calls from the engine with the most to the one with the least, where the ratio of their step times says so."""
    busy = [host for host in hosts if host.engine.load]
    if len(hosts) < 2 or not busy:
        return
    slow = max(busy, key=lambda host: (_step(world, host), -host.number))
    fast = min(hosts, key=lambda host: (_step(world, host), host.number))
    if _step(world, slow) <= TRIGGER * _step(world, fast):
        return
    calls = [call.owner for call in slow.engine.calls() if call.owner.group.version <= fast.version]
    for sample in reversed(calls):
        if _step(world, slow) <= STOP * _step(world, fast):
            return
        world.move(sample, fast)


def _step(world: World, host: Host) -> float:
    return world.scenario.engine.model.step_s(host.engine.load, host.engine.kv)
