"""Moves running calls between engines (StaleFlow, arXiv 2601.12784). Runs only while no engine pulls weights.

It moves calls for one of two reasons, checked in this order:

- more than `waiting_above` calls wait in an engine's own queue, while another engine has room. Those with the fewest tokens go
  first, the last placed among equals: whatever a call has must be computed again where it goes, so they cost least, and they are
  the ones that stand in an engine's queue;
- engines are unequally fast. StaleFlow's rule: an engine samples more than `gap_above` times what another does; calls with the
  fewest tokens go from the fastest to the slowest, the second fastest to the second slowest and so on, until the gap is below
  `gap_until`, as long as both together sample more for it. Where late calls count more (`placement.py`), headgate's takes its
  place: a call goes from one of the slowest engines to one of the fastest if it adds `gap_until` times as much there, in what
  calls count times their speed, less what its prefill costs there if it samples as much again as it has. Those that count most
  go first, of these the longest: they keep a batch waiting, and a prefill is cheap compared with that. The sum over all calls
  grows with every move, so no call moves back and forth.

A call whose sampler has a state never moves, and none to an engine of a version below its `min_version`. Where several
processes move calls by the same snapshot, each move stands for `times` (`placement.py`), and a process decides on its share of
the moves.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from scheduler.policies.placement import Choice, OpenEngine

_LOOKED_AT = 4
"""The number of fastest engines that are compared for a call, and of calls without a better engine after which an engine
is skipped."""
_FRUITLESS = 16
"""The number of slow engines in a row without a move after which no other is examined."""


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """Thresholds for moving calls. The ratios are those of the authors' documentation."""

    on: bool = True
    waiting_above: int = 2
    gap_above: float = 2.0
    gap_until: float = 1.2
    per_engine: int = 8
    """The most calls that are moved at one time, for each engine."""


@dataclass(frozen=True, slots=True)
class Movable:
    """A call in an engine that can leave it."""

    call: str
    version: int
    length: int
    weight: float = 1.0
    """The call's weight; above 1 for a late call."""


class _Plan:
    """The engines as they will be, and the calls that move. They are copied when a call moves: in most seconds none does."""

    def __init__(self, engines: Iterable[OpenEngine], settings: MigrationSettings, times: int) -> None:
        self.engines = list(engines)
        self.moves: list[tuple[str, str, str]] = []
        self.times = times
        self._most = max(1, settings.per_engine * len(self.engines) // times)
        self._own = False

    def begin(self) -> list[OpenEngine]:
        """Return the engines, which may be changed from now on."""
        if not self._own:
            self._own = True
            self.engines = [replace(engine) for engine in self.engines]
        return self.engines

    @property
    def full(self) -> bool:
        return len(self.moves) >= self._most

    def move(self, call: Movable, source: OpenEngine, target: OpenEngine) -> None:
        self.moves.append((call.call, source.name, target.name))
        for engine, more in ((source, -self.times), (target, self.times)):
            engine.running = max(0, engine.running + more)
            engine.kv = max(0, engine.kv + more * call.length)
            engine.extra = max(0.0, engine.extra + more * (call.weight - 1))


def moves(
    engines: Collection[OpenEngine],
    inside: Callable[[str], Iterable[Movable]],
    choice: Choice,
    settings: MigrationSettings,
    times: int = 1,
) -> list[tuple[str, str, str]]:
    """Return the calls to move, each with its engine and where it is expected to go.

    `inside`: the calls that an engine was given and that can leave it, in the order in which they were placed.
    """
    if not settings.on or len(engines) < 2:
        return []
    crowded = any(engine.waiting > settings.waiting_above for engine in engines)
    if not crowded and not choice.weighs and not _gap(engines, settings):
        return []  # the usual end: no call needs to move
    plan = _Plan(engines, settings, times)
    _from_queues(plan, inside, choice, settings)
    if not plan.moves and choice.weighs:
        _to_gain(plan, inside, choice, settings)
    elif not plan.moves:
        _from_fast_to_slow(plan, inside, settings)
    return plan.moves


def _from_queues(
    plan: _Plan, inside: Callable[[str], Iterable[Movable]], choice: Choice, settings: MigrationSettings
) -> None:
    if not any(engine.waiting > settings.waiting_above for engine in plan.engines):
        return
    crowded = [engine for engine in plan.begin() if engine.waiting > settings.waiting_above]
    others = [engine for engine in plan.engines if not engine.waiting]
    others.sort(key=lambda engine: (engine.running, engine.name))
    for source in sorted(crowded, key=lambda engine: (-engine.waiting, engine.name)):
        for call in _cheapest(inside(source.name)):
            if source.waiting <= settings.waiting_above or plan.full:
                break
            target = next((engine for engine in others if _takes(engine, call, choice)), None)
            if target is None:
                break
            plan.move(call, source, target)
            source.waiting = max(0, source.waiting - plan.times)
            others.sort(key=lambda engine: (engine.running, engine.name))


def _takes(engine: OpenEngine, call: Movable, choice: Choice) -> bool:
    """Return true if the engine has room for the call and may sample it."""
    legal = not engine.waiting and engine.version >= call.version
    return legal and choice.pays(engine, call.length, call.weight)


def _to_gain(
    plan: _Plan, inside: Callable[[str], Iterable[Movable]], choice: Choice, settings: MigrationSettings
) -> None:
    """Call out of the slowest engines, each into the best of the fastest that may have it."""
    fastest = sorted((engine.step_s(1), i) for i, engine in enumerate(plan.engines) if not engine.waiting)
    slowest = sorted((-engine.step_s(), engine.name, i) for i, engine in enumerate(plan.engines))
    fruitless = 0
    for _, name, number in slowest:
        failures, before = 0, len(plan.moves)
        for call in sorted(inside(name), key=lambda call: (-call.weight, -call.length)):
            source = plan.engines[number]
            if plan.full or not fastest or source.step_s() <= fastest[0][0]:
                return
            found = _better(call, source, plan.engines, fastest, choice, settings.gap_until)
            if found is None:
                failures += 1
                if failures == _LOOKED_AT:
                    break
                continue
            (_, i), engines = fastest.pop(found), plan.begin()
            plan.move(call, engines[number], engines[i])
            insort(fastest, (engines[i].step_s(1), i))
        fruitless = fruitless + 1 if len(plan.moves) == before else 0
        if fruitless == _FRUITLESS:
            return


def _better(
    call: Movable,
    source: OpenEngine,
    engines: Sequence[OpenEngine],
    fastest: Sequence[tuple[float, int]],
    choice: Choice,
    ratio: float,
) -> int | None:
    """Return the place among the fastest of the engine in which a call gains most, if that is `ratio` times what it adds to
    its own."""
    legal = ((engines[i], n) for n, (_, i) in enumerate(fastest) if engines[i].version >= call.version)
    keyed = [
        (choice.key(engine, call.length, 0, call.weight, stay=call.length), n)
        for engine, n in islice(legal, _LOOKED_AT)
        if engine is not source
    ]
    (less, *_), best = min(keyed, default=((0.0,), -1))
    return best if -less > ratio * max(source.adds(call.length, call.weight), 0.0) else None


def _gap(engines: Iterable[OpenEngine], settings: MigrationSettings) -> bool:
    """Return true if one engine samples enough more than another that moving calls pays."""
    rates = [engine.rate for engine in engines]
    return max(rates) > settings.gap_above * min(rates)


def _from_fast_to_slow(
    plan: _Plan, inside: Callable[[str], Iterable[Movable]], settings: MigrationSettings
) -> None:
    slow_first = sorted(plan.begin(), key=lambda engine: (engine.rate, engine.name))
    takers = list(slow_first)
    for fast in reversed(slow_first):
        if plan.full or fast.running < 2 or fast.rate <= settings.gap_above * slow_first[0].rate:
            break
        newest = max(fast.calls_by_version, default=0)
        slow = next((engine for engine in takers if engine.version >= newest), fast)
        if fast.rate <= settings.gap_above * slow.rate:
            continue
        takers.remove(slow)
        for call in _cheapest(inside(fast.name)):
            if plan.full or fast.rate <= settings.gap_until * slow.rate:
                break
            if slow.version < call.version:
                continue
            if slow.gain(call.length, call.weight) <= fast.adds(call.length, call.weight):
                break
            plan.move(call, fast, slow)


def _cheapest(calls: Iterable[Movable]) -> list[Movable]:
    newest_first = list(calls)[::-1]
    return sorted(newest_first, key=lambda call: call.length)
