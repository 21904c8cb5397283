"""The open engines of one model, in the order of their load, and the best of them for a call (`placement.py` has the rule).

Owns what runs in each engine as far as is known. A placed call counts immediately, even if a later snapshot lacks it. Where
several processes place calls by the same snapshot, each assumes that the others behave the same way: what it places counts
`times` times until the next one. Engines lie in heaps by version, so a choice costs the logarithm of their number; under `gain`
the heaps are ordered for a call of typical length, late calls have their own, and the best `_LOOKED_AT` of each are compared for
the call itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from scheduler.policies.placement import Choice, EngineRequest, Key, OpenEngine
from scheduler.policies.throughput import EngineModel

_LOOKED_AT = 4
BETTER = 1.2
"""How many times as much another engine must add for a call to leave its cache, as for a call that moves (`migration`)."""
_DRIFT = 0.02
"""The weight of every new call in the typical length."""
_Entry = tuple[Key, int, OpenEngine]
_Place = tuple[bool, int]
"""The key of a heap: for late calls or not, the engines' version."""


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
        self.candidate: int | None = None
        """The version on trial: its engines get the calls whose `min_version` it is, and no others."""
        self.times = 1
        """How many calls each local placement represents, if peers place in the same way."""
        self._heaps: dict[_Place, list[_Entry]] = {}
        """An entry that is not its engine's newest is void."""
        self._unfiled: dict[str, OpenEngine] = {}
        """Open engines that have changed since their newest entries; a choice files them first. Where one engine is open, no
        choice needs entries."""
        self._stamp = 0
        """The last stamp that was given."""

    # Events of engines

    def opened(
        self,
        name: str,
        version: int,
        model: EngineModel,
        runs: Iterable[tuple[int, int]] = (),
        far_s: float = 0.0,
    ) -> None:
        """Open an engine that runs this version. `runs` has `min_version` and length of the calls that it kept; `far_s`: what a
        call loses by its distance."""
        self.closed(name)
        engine = OpenEngine(name, version, self._models.get(name, model), far_s)
        self.open[name] = engine
        for version_then, length in runs:
            self._count(engine, version_then, 1)
            engine.kv += length
        engine.floor = engine.kv
        self._unfiled[engine.name] = engine

    def closed(self, name: str) -> None:
        """Close an engine: it takes no calls."""
        if engine := self.open.pop(name, None):
            engine.stamp = 0
            self._unfiled.pop(name, None)

    def fitted(self, name: str, model: EngineModel) -> None:
        """Set the engine's speed model, now and for when it opens again."""
        self._models[name] = model
        if engine := self.open.get(name):
            engine.model = model
            self._unfiled[engine.name] = engine

    def published(self, version: int) -> None:
        """Make this version the newest."""
        self._set_newest(max(self.newest, version))

    def withdrawn(self, version: int) -> None:
        """Make this version the newest again, because newer ones are bad."""
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
            local = engine.running - engine.foreign
            engine.foreign = max(0, running + waiting - local)
            engine.running = local + engine.foreign
            engine.kv, engine.waiting = max(kv, engine.floor), waiting

    def apply_peer_load(self, processes: int, running: Iterable[tuple[str, int, int]]) -> None:
        """Apply the calls of other processes, by the snapshot that was just applied: engine, `min_version`, and how many calls.

        A process with a share of 1/n of all calls assumes that n - 1 others like it exist, but no more than there are.
        """
        by_engine: dict[str, list[tuple[int, int]]] = {}
        for name, version, calls in running:
            by_engine.setdefault(name, []).append((version, calls))
        foreign = local = 0
        for name, engine in self.open.items():
            foreign += engine.foreign
            local += engine.running - engine.foreign
            engine.peer_calls = tuple(by_engine.get(name, ()))
            self._weigh(engine)
        self.times = 1 + min(processes - 1, round(foreign / local) if local else foreign)

    def count_elsewhere(self, request: EngineRequest) -> bool:
        """Count a waiting call of another process where it would go, until a snapshot shows it. Return false if it waits."""
        engine = self.best(request)
        if engine is None:
            return False
        self._echo(engine, 1, request.length)
        self._unfiled[engine.name] = engine
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
        self._unfiled.clear()
        for engine in self.open.values():
            engine.stamp = self._next_stamp()
            for place, entry in self._entries(engine):
                self._heaps.setdefault(place, []).append(entry)
        for heap in self._heaps.values():
            heapq.heapify(heap)

    # Events of calls

    def add_call(self, name: str, version: int, length: int) -> None:
        """Count a call of that `min_version` that was placed in an open engine."""
        engine = self.open[name]
        self._count(engine, version, 1)
        engine.kv += length
        engine.floor += length
        if self.times > 1:
            self._echo(engine, self.times - 1, length)
        self._unfiled[engine.name] = engine

    def remove_call(self, name: str, version: int, length_then: int, length_now: int) -> None:
        """Remove a call of that `min_version` that was placed with `length_then` tokens and left with `length_now`."""
        if engine := self.open.get(name):
            self._count(engine, version, -1)
            engine.floor -= length_then
            engine.kv = max(engine.kv - length_now, engine.floor)
            if self.times > 1:
                self._echo(engine, 1 - self.times, length_now)
            engine.waiting = max(0, min(engine.waiting - 1, engine.running))
            self._unfiled[engine.name] = engine

    def learn(self, length: int) -> None:
        """Count the length of a call that has arrived."""
        self.typical += (length - self.typical) * _DRIFT

    # Choices

    def best(self, request: EngineRequest) -> OpenEngine | None:
        """Return the best engine that has room for a call; None: it waits."""
        preferred = self.open.get(request.preferred)
        if preferred is not None and self._admits(preferred.version, request.version):
            return preferred
        return self._best_of(request, self._candidates(request))

    def legal(self, version: int) -> bool:
        """Return true if an open engine may sample calls of this `min_version`."""
        return any(self._admits(version_there, version) for _, version_there in self._heaps_in_use())

    def _admits(self, version_there: int, version: int) -> bool:
        """Return true if an engine of `version_there` may sample calls of this `min_version`."""
        if self.candidate is not None and (version_there < self.candidate) != (version < self.candidate):
            return False
        return version_there >= version

    def weight(self, version: int) -> float:
        """Return the present weight of a call of this `min_version`."""
        return self.choice.weight(self.newest - version) if version < self.newest else 1.0

    def _best_of(self, request: EngineRequest, candidates: list[OpenEngine]) -> OpenEngine | None:
        if not candidates:
            return None
        wanted = [engine for engine in candidates if engine.name not in request.avoid] or candidates
        length, weight = request.length, self.weight(request.version)
        best = wanted[0] if len(wanted) == 1 else self._first_of(wanted, request, weight)
        return best if self.choice.has_room(best, length, weight) else None

    def _first_of(self, wanted: list[OpenEngine], request: EngineRequest, weight: float) -> OpenEngine:
        """Return the engine that is first in their order for a call, or the one that has most of it cached."""
        key, length = self.choice.key, request.length
        cached = {request.cached_in: min(request.cached, request.length)} if request.cached_in else {}
        keyed = [(key(e, length, cached.get(e.name, 0), weight), e) for e in wanted]
        (less, *_), best = min(keyed, key=lambda pair: pair[0])
        if self.choice.rule == "gain" and 2 * request.cached > request.length:
            for (here, *_), engine in keyed:
                if engine.name == request.cached_in and -less <= BETTER * -here:
                    best = engine
        return best

    def _candidates(self, request: EngineRequest) -> list[OpenEngine]:
        """Return the legal engines that could be best: the first of each heap, and the one that has the call's prefix cached."""
        if len(self.open) == 1:
            return [engine for engine in self.open.values() if self._admits(engine.version, request.version)]
        self._file_changed()
        count, found = _LOOKED_AT + len(request.avoid), []
        late = self.choice.weighs and request.version < self.newest
        for place, heap in self._heaps.items():
            if place[0] == late and self._admits(place[1], request.version):
                found += _first(heap, count)
        cached_in = self.open.get(request.cached_in)
        if (
            cached_in is not None
            and cached_in not in found
            and self._admits(cached_in.version, request.version)
        ):
            found.append(cached_in)
        return found

    def _heaps_in_use(self) -> Iterator[_Place]:
        """Return the heaps that are not empty."""
        self._file_changed()
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
            yield (False, engine.version), (choice.key(engine, 0, 0), engine.stamp, engine)
            return
        steps_s = engine.steps_s(length)
        for late, weight in enumerate(self._weights):
            key = choice.key_at(engine, steps_s, length, 0, weight)
            yield (late > 0, engine.version), (key, engine.stamp, engine)

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def _file_changed(self) -> None:
        """Give every engine that has changed new entries."""
        for engine in self._unfiled.values():
            self._file(engine)
        self._unfiled.clear()

    def _file(self, engine: OpenEngine) -> None:
        engine.stamp = self._next_stamp()
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
