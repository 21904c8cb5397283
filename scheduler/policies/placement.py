"""Places calls in engines (StaleFlow, arXiv 2601.12784): in the best of those whose version is at least the call's `min_version`.

Two rules decide which is best, and whether there is room for the call or it waits (`waterfall.py`):

- `cached` (`routing.py`): where its prefix is cached, if that outweighs the load there, else where least is running; any open
  engine has room.
- `gain`: where its coming adds most tokens a second (`throughput.py`), less what the prefill of tokens that are not cached takes
  from the others; an engine has room while the gain is above `min_gain_share` of what the call would add to an empty engine, and
  while nothing waits in the engine's own queue. A call most of which an engine has in its cache, as a later turn has, stays
  there until another one adds `_BETTER` times as much, prefill included: where it goes else, the turns after it have nothing
  either. So an agent that fans out gets several engines.

*Late calls* (headgate's addition to `gain`). A group that began under `min_version` is trained by `min_version` + eta: the
calls of it that still run when newer versions exist keep a batch waiting, and the rest do not. So a call weighs
`late_call_weight` times as much for each version that its `min_version` is behind the newest, and the sum over the calls of
weight times speed is maximized. A late call then gets the fastest engine, and the others stay out of that while they gain about
as much elsewhere. With a `late_call_weight` of 1 all calls weigh the same, and the sum is tokens a second.

A placed call counts immediately, even if a later snapshot lacks it. Where several processes place calls by the same snapshot,
each assumes that the others behave the same way: what it places counts `times` times until the next one. Engines lie in heaps by
version, so a choice costs the logarithm of their number; under `gain` the heaps are ordered for a call of typical length, late
calls have their own, and the best `_LOOKED_AT` of each are compared for the call itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from scheduler.policies.routing import cached_key
from scheduler.policies.throughput import EngineModel

Rule = Literal["cached", "gain"]
_LOOKED_AT = 4
_STAY = 256
"""The assumed number of tokens still to come, where there is no prediction."""
_BETTER = 1.2
"""How many times as much another engine must add for a call to leave its cache, as for a call that moves (`migration`)."""
_DRIFT = 0.02
"""The weight of every new call in the typical length."""
_MOST_LATE = 4
"""A call that is more versions behind counts no more for that: it may be of a model that has no versions."""
_FULL = float("inf")


class EngineRequest(Protocol):
    """A call's requirements (`scheduler.program.calls.Arrived`)."""

    @property
    def call(self) -> str:
        """Its name."""
        ...

    @property
    def version(self) -> int:
        """No older version may sample it."""
        ...

    @property
    def length(self) -> int:
        """Tokens of its prompt and of what was sampled so far."""
        ...

    @property
    def expected(self) -> int:
        """The predicted number of tokens still to come; 0: unknown."""
        ...

    @property
    def cached_in(self) -> str:
        """The engine that has `cached` of its tokens."""
        ...

    @property
    def cached(self) -> int: ...

    @property
    def avoid(self) -> tuple[str, ...]:
        """Engines to avoid while there is another."""
        ...

    @property
    def preferred(self) -> str:
        """The engine to use, if that may sample it."""
        ...


@dataclass(slots=True, eq=False)
class OpenEngine:
    """An engine that takes calls, and what runs in it as far as is known now."""

    name: str
    version: int
    model: EngineModel
    running: int = 0
    """Calls in it, its own queue included: those placed here, and `foreign`."""
    foreign: int = 0
    """Calls in it that other processes placed, by the last snapshot."""
    kv: int = 0
    """Tokens in its cache that belong to calls in it."""
    floor: int = 0
    """Tokens of the calls placed here, at their placement: a lower bound of `kv`, whatever a snapshot reports."""
    waiting: int = 0
    """Calls in its own queue, by the last snapshot, less those that have left."""
    calls_by_version: dict[int, int] = field(default_factory=dict)
    """Calls that were placed here, by `min_version`."""
    peer_calls: tuple[tuple[int, int], ...] = ()
    """The same of other processes, by the last snapshot: `min_version`, and how many."""
    extra: float = 0.0
    """The weight of its calls beyond one each."""
    stamp: int = 0
    """The stamp of the engine's newest entries in its heaps."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.model.rate(self.running, self.kv)

    def step_s(self, more: int = 0) -> float:
        """Return the seconds of a step, with this many more calls that have no tokens yet."""
        return self.model.step_s(self.running + more, self.kv)

    def steps_s(self, length: int) -> tuple[float, float]:
        """Return the seconds of a step now, and with one more call of `length` tokens."""
        model, running, kv = self.model, self.running, self.kv
        return model.step_s(running, kv), model.step_s(running + 1, kv + length)

    def adds(self, length: int, weight: float = 1.0) -> float:
        """Return the gain of a call that is already in the engine, computed as if it arrived now."""
        kv, extra = max(0, self.kv - length), self.extra - (weight - 1)
        return self.model.gain(self.running - 1, kv, length, extra, weight)

    def gain(self, length: int, weight: float = 1.0) -> float:
        """Return the tokens a second that one more call of `length` tokens adds, each call's times what it counts."""
        return self.model.gain(self.running, self.kv, length, self.extra, weight)


def footprint(request: EngineRequest) -> int:
    """Return the tokens that a call has in an engine's cache, on average over its stay there, as far as is known."""
    return request.length + request.expected // 2


Key = tuple[float, int, int, str]
_Entry = tuple[Key, int, OpenEngine]
_Place = tuple[bool, int]
"""The key of a heap: for late calls or not, the engines' version."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule. `min_gain_share`: the share of its ideal gain that a call must add to enter an engine. `late_call_weight`: see
    the module.

    The defaults of this class, of `MigrationSettings` and of `SyncSettings` are those of the gateway and of the simulator.
    """

    rule: Rule = "gain"
    min_gain_share: float = 0.2
    late_call_weight: float = 64.0

    def __post_init__(self) -> None:
        if self.rule not in ("cached", "gain"):
            raise ValueError(f"rule is 'cached' or 'gain', not {self.rule!r}")
        if not 1 <= self.late_call_weight <= 1e6:
            raise ValueError(
                f"late_call_weight is from 1 (all calls count the same) to 1e6, not {self.late_call_weight}"
            )
        if not 0 <= self.min_gain_share < 1:
            raise ValueError(
                f"min_gain_share is at least 0 and below 1: an empty engine takes any call; it is {self.min_gain_share}"
            )

    @property
    def weighs(self) -> bool:
        """True if late calls count more than others."""
        return self.rule == "gain" and self.late_call_weight > 1

    def weight(self, behind: int) -> float:
        """Return the weight of a call whose oldest allowed version is `behind` versions behind the newest."""
        return self.late_call_weight ** min(max(behind, 0), _MOST_LATE) if self.weighs else 1.0

    def key(self, engine: OpenEngine, length: int, expected: int, cached: int, weight: float = 1.0) -> Key:
        """Return the engines in their order, the best first, for a call of which `cached` tokens are cached there.

        Among equals the older version: the newer engine may have calls that no other may.
        """
        if self.rule == "cached":
            return (*cached_key(engine.running, cached), 0, engine.name)
        return self.key_at(engine, engine.steps_s(length), length, expected, cached, weight)

    def key_at(
        self,
        engine: OpenEngine,
        steps_s: tuple[float, float],
        length: int,
        expected: int,
        cached: int,
        weight: float,
    ) -> Key:
        """Return the same under `gain`, where `steps_s` is known. It runs thousands of times a second, so it is one function."""
        now_s, then_s = steps_s
        running, model = engine.running, engine.model
        if not self.pays(engine, length, weight, steps_s):
            return (_FULL, running, engine.version, engine.name)
        inside = running + engine.extra
        prefill_s = model.s_per_call * (length - cached)
        lost = (inside + weight) / then_s * prefill_s / ((expected or _STAY) * then_s)
        gain = (inside + weight) / then_s - (inside / now_s if running else 0.0)
        return (lost - gain, running, engine.version, engine.name)

    def has_room(self, engine: OpenEngine, length: int, weight: float = 1.0) -> bool:
        """Return true if it is better for a call to run in the engine than to wait: by tokens a second, whatever the others
        count. A call with more weight waits for less."""
        return self.rule == "cached" or self.pays(engine, length, weight)

    def pays(
        self,
        engine: OpenEngine,
        length: int,
        weight: float = 1.0,
        steps_s: tuple[float, float] | None = None,
    ) -> bool:
        """Return true if a call adds enough tokens a second to the engine, by `min_gain_share`, and nothing waits there. An empty
        engine accepts any call. `steps_s`: as `OpenEngine.steps_s`, where it is known."""
        if not engine.running:
            return True
        now_s, then_s = steps_s or engine.steps_s(length)
        gain = (engine.running + 1) / then_s - engine.running / now_s
        return not engine.waiting and gain > self.min_gain_share / weight * engine.model.alone(length)


class Engines:
    """Every open engine, by name and in the order of its load."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._weights = (choice.weight(0), choice.weight(1)) if choice.weighs else (1.0,)
        """The weights of a call in time and of a late one; each has heaps of its own."""
        self.open: dict[str, OpenEngine] = {}
        self.typical = 512.0
        """The length of a call, on average, the newest most."""
        self._models: dict[str, EngineModel] = {}
        self.newest = 0
        """The newest version: calls of an older `min_version` are late."""
        self.times = 1
        """How many calls each local placement represents, if peers place in the same way."""
        self._heaps: dict[_Place, list[_Entry]] = {}
        """An entry that is not its engine's newest is void."""
        self._stamps = itertools.count(1)

    # Events of engines

    def opened(
        self, name: str, version: int, model: EngineModel, runs: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Open an engine that runs this version. `runs` has `min_version` and length of the calls that it kept."""
        self.closed(name)
        engine = OpenEngine(name, version, self._models.get(name, model))
        self.open[name] = engine
        for version_then, length in runs:
            self._count(engine, version_then, 1)
            engine.kv += length
        engine.floor = engine.kv
        self._file(engine)

    def closed(self, name: str) -> None:
        """Close an engine: it takes no calls."""
        if engine := self.open.pop(name, None):
            engine.stamp = 0

    def fitted(self, name: str, model: EngineModel) -> None:
        """Set the engine's speed model, now and for when it opens again."""
        self._models[name] = model
        if engine := self.open.get(name):
            engine.model = model
            self._file(engine)

    def published(self, version: int) -> None:
        """Make this version the newest."""
        self._set_newest(max(self.newest, version))

    def withdrawn(self, version: int) -> None:
        """Newer versions are of no use: it is the newest again."""
        self._set_newest(version)

    def _set_newest(self, version: int) -> None:
        self.newest = version
        if self.choice.weighs:
            for engine in self.open.values():
                self._weigh(engine)
            self.refile()

    def apply_snapshot(self, name: str, running: int, waiting: int, kv: int) -> None:
        """Apply a snapshot. Calls that were placed since stay counted. Call `refile` after the last one."""
        if engine := self.open.get(name):
            own = engine.running - engine.foreign
            engine.foreign = max(0, running + waiting - own)
            engine.running = own + engine.foreign
            engine.kv, engine.waiting = max(kv, engine.floor), waiting

    def apply_peer_load(self, processes: int, running: Iterable[tuple[str, int, int]]) -> None:
        """Apply the calls of other processes, by the snapshot that was just applied: engine, `min_version`, and how many calls.

        A process with a share of 1/n of all calls assumes that n - 1 others like it exist, but no more than there are.
        """
        by_engine: dict[str, list[tuple[int, int]]] = {}
        for name, version, calls in running:
            by_engine.setdefault(name, []).append((version, calls))
        foreign = own = 0
        for name, engine in self.open.items():
            foreign += engine.foreign
            own += engine.running - engine.foreign
            engine.peer_calls = tuple(by_engine.get(name, ()))
            self._weigh(engine)
        self.times = 1 + min(processes - 1, round(foreign / own) if own else foreign)

    def elsewhere(self, request: EngineRequest) -> bool:
        """Another process has a call that waits: where it would go is counted, until a snapshot shows it. False: nowhere."""
        engine = self.best(request)
        if engine is None:
            return False
        self._echo(engine, 1, footprint(request))
        self._file(engine)
        return True

    def _echo(self, engine: OpenEngine, calls: int, length: int) -> None:
        """Count calls of other processes, or their ends, that no snapshot has shown."""
        calls = max(calls, -engine.foreign)
        engine.foreign += calls
        engine.running += calls
        engine.kv = max(engine.kv + calls * length, engine.floor)

    def refile(self) -> None:
        """Order all engines again."""
        self._heaps.clear()
        for engine in self.open.values():
            engine.stamp = next(self._stamps)
            for place, entry in self._entries(engine):
                self._heaps.setdefault(place, []).append(entry)
        for heap in self._heaps.values():
            heapq.heapify(heap)

    # Events of calls

    def begun(self, name: str, version: int, length: int) -> None:
        """Count a call of that `min_version` that was placed in an open engine."""
        engine = self.open[name]
        self._count(engine, version, 1)
        engine.kv += length
        engine.floor += length
        if self.times > 1:
            self._echo(engine, self.times - 1, length)
        self._file(engine)

    def ended(self, name: str, version: int, length_then: int, length_now: int) -> None:
        """Remove a call of that `min_version` that was placed with `length_then` tokens and left with `length_now`."""
        if engine := self.open.get(name):
            self._count(engine, version, -1)
            engine.floor -= length_then
            engine.kv = max(engine.kv - length_now, engine.floor)
            if self.times > 1:
                self._echo(engine, 1 - self.times, length_now)
            engine.waiting = max(0, min(engine.waiting - 1, engine.running))
            self._file(engine)

    def learn(self, length: int) -> None:
        """Count the length of a call that has arrived."""
        self.typical += (length - self.typical) * _DRIFT

    # Choices

    def best(self, request: EngineRequest) -> OpenEngine | None:
        """Return the best engine that has room for a call; None: it waits."""
        preferred = self.open.get(request.preferred)
        if preferred is not None and preferred.version >= request.version:
            return preferred
        return self._best_of(request, self._candidates(request))

    def legal(self, version: int) -> bool:
        """Return true if an open engine may sample calls of this `min_version`."""
        return any(version_there >= version for _, version_there in self._heaps_in_use())

    def weight(self, version: int) -> float:
        """Return the present weight of a call of this `min_version`."""
        return self.choice.weight(self.newest - version) if version < self.newest else 1.0

    def _best_of(self, request: EngineRequest, candidates: list[OpenEngine]) -> OpenEngine | None:
        if not candidates:
            return None
        wanted = [engine for engine in candidates if engine.name not in request.avoid] or candidates
        key, length, expected = self.choice.key, footprint(request), request.expected
        weight = self.weight(request.version)
        cached = {request.cached_in: min(request.cached, request.length)} if request.cached_in else {}
        keyed = [(key(e, length, expected, cached.get(e.name, 0), weight), e) for e in wanted]
        (less, *_), best = min(keyed, key=lambda pair: pair[0])
        if self.choice.rule == "gain" and 2 * request.cached > request.length:
            for (here, *_), engine in keyed:
                if engine.name == request.cached_in and -less <= _BETTER * -here:
                    best = engine
        return best if self.choice.has_room(best, length, weight) else None

    def _candidates(self, request: EngineRequest) -> list[OpenEngine]:
        """Return the legal engines that could be best: the first of each heap, and the one that has the call's prefix cached."""
        count, found = _LOOKED_AT + len(request.avoid), []
        late = self.choice.weighs and request.version < self.newest
        for place, heap in self._heaps.items():
            if place[0] == late and place[1] >= request.version:
                found += _first(heap, count)
        cached_in = self.open.get(request.cached_in)
        if cached_in is not None and cached_in.version >= request.version and cached_in not in found:
            found.append(cached_in)
        return found

    def _heaps_in_use(self) -> Iterator[_Place]:
        """Return the heaps that are not empty."""
        for place, heap in list(self._heaps.items()):
            while heap and heap[0][1] != heap[0][2].stamp:
                heapq.heappop(heap)
            if heap:
                yield place
            else:
                del self._heaps[place]

    def _count(self, engine: OpenEngine, version: int, calls: int) -> None:
        """Add to the number of calls with that `min_version`."""
        engine.running += calls
        if count := engine.calls_by_version.get(version, 0) + calls:
            engine.calls_by_version[version] = count
        else:
            del engine.calls_by_version[version]
        if len(self._weights) > 1:
            self._weigh(engine)

    def _weigh(self, engine: OpenEngine) -> None:
        calls = [*engine.calls_by_version.items(), *engine.peer_calls]
        engine.extra = sum(count * (self.weight(version) - 1) for version, count in calls)

    def _entries(self, engine: OpenEngine) -> Iterator[tuple[_Place, _Entry]]:
        """Yield the engine's entries for the heaps that it belongs to: how good it is in each."""
        length, choice = int(self.typical), self.choice
        if choice.rule == "cached":
            yield (False, engine.version), (choice.key(engine, 0, 0, 0), engine.stamp, engine)
            return
        steps_s = engine.steps_s(length)
        for late, weight in enumerate(self._weights):
            key = choice.key_at(engine, steps_s, length, 0, 0, weight)
            yield (late > 0, engine.version), (key, engine.stamp, engine)

    def _file(self, engine: OpenEngine) -> None:
        engine.stamp = next(self._stamps)
        for place, entry in self._entries(engine):
            heap = self._heaps.setdefault(place, [])
            heapq.heappush(heap, entry)
            if len(heap) > 64 + 4 * len(self.open):
                heap[:] = [entry for entry in heap if entry[1] == entry[2].stamp]
                heapq.heapify(heap)


def _first(heap: list[_Entry], count: int) -> list[OpenEngine]:
    """Return the first of a heap, void entries removed."""
    found: list[_Entry] = []
    while heap and len(found) < count:
        entry = heapq.heappop(heap)
        if entry[1] == entry[2].stamp:
            found.append(entry)
    for entry in found:
        heapq.heappush(heap, entry)
    return [entry[2] for entry in found]
