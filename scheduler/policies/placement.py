"""Which engine a call goes to, and which call is next: a waterfall over versions (StaleFlow, arXiv 2601.12784).

Calls wait by their group's version V, oldest first. The call whose turn it is goes to the best engine among those whose version
is at least V; where none has room for it, it waits here, not in an engine's queue, and so does every later call of its kind: none
overtakes one that must be trained sooner. Two rules say what is best and what is room:

- `cached` (`routing.py`): where its prefix is cached, if that outweighs the load there, else where least is running; any open
  engine has room.
- `gain`: where its coming adds most tokens a second (`throughput.py`), less what the prefill of tokens that are not cached takes
  from the others; an engine has room while the gain is above `mu` of what the call would add to an empty engine, and while
  nothing waits in the engine's own queue.

Engines that are set aside take calls predicted to be long alone (`tails.py`); others go there only while no other may have them.
What was placed counts at once, whatever a later snapshot still lacks. Engines lie in heaps by version, so a choice costs the
logarithm of their number; under `gain` the heaps are ordered for a call of typical length, and the best `_LOOKED_AT` of each are
compared for the call itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from scheduler.policies.routing import CALL_TOKENS
from scheduler.policies.throughput import EngineModel

Rule = Literal["cached", "gain"]
_LOOKED_AT = 4
_STAY = 256
"""Tokens that a call is still to sample, where nobody knows."""
_DRIFT = 0.02
"""How much of the typical length every new call makes up."""
_FULL = float("inf")


class Wish(Protocol):
    """What a call wants (`scheduler.program.calls.Arrived`)."""

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
        """Tokens still to come; 0: nobody knows."""
        ...

    @property
    def tail(self) -> bool:
        """It is predicted to be long."""
        ...

    @property
    def near(self) -> str:
        """The engine that has `cached` of its tokens."""
        ...

    @property
    def cached(self) -> int:
        """See `near`."""
        ...

    @property
    def avoid(self) -> tuple[str, ...]:
        """Engines that it shall not go to while there is another."""
        ...

    @property
    def to(self) -> str:
        """The engine that it shall go to, if that may have it."""
        ...


@dataclass(slots=True, eq=False)
class OpenEngine:
    """An engine that takes calls, and what runs in it as far as is known now."""

    name: str
    version: int
    model: EngineModel
    aside: bool = False
    """It takes calls that are predicted to be long alone."""
    running: int = 0
    """Calls in it, its own queue included: those placed here, and `foreign`."""
    foreign: int = 0
    """Calls in it that somebody else placed, by the last snapshot."""
    kv: int = 0
    """Tokens in its cache that belong to calls in it."""
    floor: int = 0
    """Tokens that the calls placed here had when they were: `kv` is no less, whatever a snapshot says."""
    waiting: int = 0
    """Calls in its own queue, by the last snapshot, less those that have left."""
    stamp: int = 0
    """Of the newest entry in its heap."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.model.rate(self.running, self.kv)

    def gain(self, length: int) -> float:
        """Tokens a second that one more call of `length` tokens adds."""
        return self.model.gain(self.running, self.kv, length)


Key = tuple[float, int, int, str]
_Entry = tuple[Key, int, OpenEngine]


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule, and `mu`: how small a share of its ideal gain still lets a call into an engine."""

    rule: Rule = "cached"
    mu: float = 0.05

    def __post_init__(self) -> None:
        if self.rule not in ("cached", "gain"):
            raise ValueError(f"rule is 'cached' or 'gain', not {self.rule!r}")
        if not 0 <= self.mu < 1:
            raise ValueError(f"mu is at least 0 and below 1: an empty engine takes any call; it is {self.mu}")

    def key(self, engine: OpenEngine, length: int, expected: int, cached: int) -> Key:
        """Engines in their order, the best first, for a call of which `cached` tokens are cached there.

        Among equals the older version: the newer engine may have calls that no other may.
        """
        if self.rule == "cached":
            return (engine.running * CALL_TOKENS - cached, -cached, 0, engine.name)
        if engine.waiting and engine.running:
            return (_FULL, engine.running, engine.version, engine.name)
        step_s = engine.model.step_s(engine.running + 1, engine.kv + length)
        prefill_s = engine.model.k3 * (length - cached)
        lost = (engine.running + 1) / step_s * prefill_s / ((expected or _STAY) * step_s)
        return (lost - engine.gain(length), engine.running, engine.version, engine.name)

    def has_room(self, engine: OpenEngine, length: int) -> bool:
        """Whether it is better for a call to be in the engine than to wait."""
        if self.rule == "cached" or not engine.running:
            return True
        return not engine.waiting and engine.gain(length) > self.mu * engine.model.alone(length)


class Engines:
    """Every open engine, by name and in the order of its load."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.open: dict[str, OpenEngine] = {}
        self.typical = 512.0
        """The length of a call, on average, the newest most."""
        self._aside: frozenset[str] = frozenset()
        self._models: dict[str, EngineModel] = {}
        self._heaps: dict[tuple[bool, int], list[_Entry]] = {}
        """Of each version, those set aside apart. An entry that is not its engine's newest is void."""
        self._stamps = itertools.count(1)

    # What happens to engines

    def opened(self, name: str, version: int, model: EngineModel, runs: Iterable[int] = ()) -> None:
        """It runs this version and takes calls. `runs`: the lengths of those that it kept."""
        self.closed(name)
        lengths = list(runs)
        engine = OpenEngine(name, version, self._models.get(name, model), name in self._aside)
        engine.running, engine.kv, engine.floor = len(lengths), sum(lengths), sum(lengths)
        self.open[name] = engine
        self._file(engine)

    def closed(self, name: str) -> None:
        """It takes no calls."""
        if engine := self.open.pop(name, None):
            engine.stamp = 0

    def fitted(self, name: str, model: EngineModel) -> None:
        """What is known of its speed, now and when it is opened again."""
        self._models[name] = model
        if engine := self.open.get(name):
            engine.model = model
            self._file(engine)

    def set_aside(self, names: Iterable[str]) -> None:
        """These take predicted tails alone, from now on and when they are opened again."""
        self._aside = frozenset(names)
        for engine in self.open.values():
            if engine.aside != (engine.name in self._aside):
                engine.aside = not engine.aside
                self._file(engine)

    def seen(self, name: str, running: int, waiting: int, kv: int) -> None:
        """A snapshot. What was placed since stays counted. Call `refile` after the last one."""
        if engine := self.open.get(name):
            own = engine.running - engine.foreign
            engine.foreign = max(0, running + waiting - own)
            engine.running = own + engine.foreign
            engine.kv, engine.waiting = max(kv, engine.floor), waiting

    def refile(self) -> None:
        """Orders all engines anew."""
        self._heaps.clear()
        for engine in self.open.values():
            engine.stamp = next(self._stamps)
            entry = (self._typical_key(engine), engine.stamp, engine)
            self._heaps.setdefault((engine.aside, engine.version), []).append(entry)
        for heap in self._heaps.values():
            heapq.heapify(heap)

    # What happens to calls

    def begun(self, name: str, length: int) -> None:
        """A call was placed in an open engine."""
        engine = self.open[name]
        engine.running += 1
        engine.kv += length
        engine.floor += length
        self._file(engine)

    def ended(self, name: str, length_then: int, length_now: int) -> None:
        """A call that was placed with `length_then` tokens has left with `length_now`."""
        if engine := self.open.get(name):
            engine.running -= 1
            engine.floor -= length_then
            engine.kv = max(engine.kv - length_now, engine.floor)
            engine.waiting = max(0, min(engine.waiting - 1, engine.running))
            self._file(engine)

    def learn(self, length: int) -> None:
        """A call of this length has come."""
        self.typical += (length - self.typical) * _DRIFT

    # What is chosen

    def best(self, wish: Wish) -> OpenEngine | None:
        """The best engine that has room for a call; None: it waits."""
        to = self.open.get(wish.to)
        if to is not None and to.version >= wish.version:
            return to
        if not wish.tail:
            regular = self._candidates(wish, aside=False)
            return self._best_of(wish, regular or self._candidates(wish, aside=True))
        found = self._best_of(wish, self._candidates(wish, aside=True))
        return found or self._best_of(wish, self._candidates(wish, aside=False))

    def legal(self, version: int) -> bool:
        """Whether an open engine may sample calls of this V."""
        return any(held >= version for _, held in self._held())

    @property
    def any_aside(self) -> bool:
        """Whether an open engine is set aside."""
        return any(aside for aside, _ in self._held())

    def _best_of(self, wish: Wish, candidates: list[OpenEngine]) -> OpenEngine | None:
        if not candidates:
            return None
        wanted = [engine for engine in candidates if engine.name not in wish.avoid] or candidates
        key, length, expected = self.choice.key, wish.length, wish.expected
        if wish.near:
            near, cached = wish.near, min(wish.cached, wish.length)
            keyed = [(key(e, length, expected, cached if e.name == near else 0), e) for e in wanted]
        else:
            keyed = [(key(engine, length, expected, 0), engine) for engine in wanted]
        _, best = min(keyed, key=lambda pair: pair[0])
        return best if self.choice.has_room(best, length) else None

    def _candidates(self, wish: Wish, *, aside: bool) -> list[OpenEngine]:
        """Those that could be best: the first of each heap, and where it is cached; the legal ones alone."""
        count, found = _LOOKED_AT + len(wish.avoid), []
        for (held_aside, version), heap in self._heaps.items():
            if held_aside == aside and version >= wish.version:
                found += _first(heap, count)
        near = self.open.get(wish.near)
        if near is not None and near.aside == aside and near.version >= wish.version and near not in found:
            found.append(near)
        return found

    def _held(self) -> Iterator[tuple[bool, int]]:
        """The heaps in which there is an engine."""
        for place, heap in list(self._heaps.items()):
            while heap and heap[0][1] != heap[0][2].stamp:
                heapq.heappop(heap)
            if heap:
                yield place
            else:
                del self._heaps[place]

    def _typical_key(self, engine: OpenEngine) -> Key:
        return self.choice.key(engine, int(self.typical), 0, 0)

    def _file(self, engine: OpenEngine) -> None:
        engine.stamp = next(self._stamps)
        heap = self._heaps.setdefault((engine.aside, engine.version), [])
        heapq.heappush(heap, (self._typical_key(engine), engine.stamp, engine))
        if len(heap) > 64 + 4 * len(self.open):
            heap[:] = [entry for entry in heap if entry[1] == entry[2].stamp]
            heapq.heapify(heap)


def _first(heap: list[_Entry], count: int) -> list[OpenEngine]:
    """The first of a heap, void entries removed."""
    found: list[_Entry] = []
    while heap and len(found) < count:
        entry = heapq.heappop(heap)
        if entry[1] == entry[2].stamp:
            found.append(entry)
    for entry in found:
        heapq.heappush(heap, entry)
    return [entry[2] for entry in found]


@dataclass(slots=True)
class _Queues:
    """The calls of one V that wait."""

    tails: list[tuple[int, int, Wish]] = field(default_factory=list)
    """Longest first."""
    others: list[tuple[int, int, Wish]] = field(default_factory=list)
    """First come, first served."""


class Waterfall:
    """The calls that wait, and how they are poured into engines."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.waiting: dict[str, Wish] = {}
        self._queues: dict[int, _Queues] = {}
        self._serials = itertools.count(1)

    def add(self, wish: Wish) -> None:
        """A call waits. Raises ValueError if it does already."""
        if wish.call in self.waiting:
            raise ValueError(f"call {wish.call} waits already")
        self.waiting[wish.call] = wish
        queues = self._queues.setdefault(wish.version, _Queues())
        entry = (-wish.expected if wish.tail else 0, next(self._serials), wish)
        heapq.heappush(queues.tails if wish.tail else queues.others, entry)

    def drop(self, call: str) -> bool:
        """It waits no more; answers whether it did."""
        return self.waiting.pop(call, None) is not None

    def heads(self) -> list[Wish]:
        """The calls whose turn it is, oldest version first."""
        found = (self._head(queue) for version in sorted(self._queues) for queue in self._of(version))
        return [wish for wish in found if wish is not None]

    def pour(self) -> list[tuple[Wish, str]]:
        """Places calls while engines have room for those whose turn it is."""
        placed: list[tuple[Wish, str]] = []
        if not self.waiting:
            self._queues.clear()
            return placed
        apart = self.engines.any_aside
        stuck = [False, False]
        for version in sorted(self._queues):
            for kind, queue in enumerate(self._of(version)):
                if not stuck[kind] and not self._drain(queue, placed):
                    stuck[kind] = True
                    stuck[1 - kind] |= not apart
            if not any(self._of(version)):
                del self._queues[version]
            if all(stuck):
                break
        return placed

    def _of(self, version: int) -> tuple[list[tuple[int, int, Wish]], list[tuple[int, int, Wish]]]:
        queues = self._queues[version]
        return queues.tails, queues.others

    def _head(self, queue: list[tuple[int, int, Wish]]) -> Wish | None:
        while queue and self.waiting.get(queue[0][2].call) is not queue[0][2]:
            heapq.heappop(queue)
        return queue[0][2] if queue else None

    def _drain(self, queue: list[tuple[int, int, Wish]], placed: list[tuple[Wish, str]]) -> bool:
        """Whether nobody is left in it."""
        while (wish := self._head(queue)) is not None:
            engine = self.engines.best(wish)
            if engine is None:
                return False
            heapq.heappop(queue)
            del self.waiting[wish.call]
            self.engines.begun(engine.name, wish.length)
            placed.append((wish, engine.name))
        return True
