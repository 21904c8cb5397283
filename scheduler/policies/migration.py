"""Which running calls go elsewhere (StaleFlow, arXiv 2601.12784). Asked only when no engine pulls weights at that moment.

Two reasons to interrupt: more than `waiting_above` calls wait in an engine's own queue, while another engine has room; or the
fastest engine samples more than `gap_above` times what the slowest does, and then calls move from one to the other until the gap
is below `gap_until`, as long as both together sample more for it.

Those with the fewest tokens go first, the last placed among equals: whatever a call has must be computed anew where it goes, so
they cost least; and they are the ones that stand in an engine's queue. A call whose sampler has a state never moves, and none to
an engine of a version below its V.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from scheduler.policies.placement import Choice, OpenEngine


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """When calls move. The ratios are those of the authors' documentation."""

    on: bool = True
    waiting_above: int = 2
    gap_above: float = 2.0
    gap_until: float = 1.2
    at_once: int = 16
    """The most calls that are told to move at one time."""

    def __post_init__(self) -> None:
        if self.waiting_above < 0 or self.at_once < 1:
            raise ValueError("waiting_above is at least 0, at_once at least 1")
        if not 1.0 <= self.gap_until <= self.gap_above:
            raise ValueError("gap_until is at least 1 and at most gap_above: calls would move to and fro")


@dataclass(frozen=True, slots=True)
class Movable:
    """A call in an engine that can leave it."""

    call: str
    version: int
    length: int


@dataclass(slots=True)
class _Load:
    """An engine, with what has been planned."""

    engine: OpenEngine
    running: int
    waiting: int
    kv: int

    def rate(self, more: int = 0, tokens: int = 0) -> float:
        return self.engine.model.rate(self.running + more, self.kv + tokens)

    def takes(self, call: Movable, choice: Choice) -> bool:
        """Whether a call would have room in it, and may be sampled there."""
        if self.waiting or self.engine.version < call.version:
            return False
        gain = self.engine.model.gain(self.running, self.kv, call.length)
        return not self.running or gain > choice.mu * self.engine.model.alone(call.length)


def moves(
    engines: Collection[OpenEngine],
    inside: Callable[[str], Iterable[Movable]],
    choice: Choice,
    settings: MigrationSettings,
) -> list[tuple[str, str, str]]:
    """Calls that are to leave, the engine of each, and where each is expected to go.

    `inside`: the calls that an engine was given and that can leave it, in the order in which they were placed.
    """
    if not settings.on or len(engines) < 2:
        return []
    loads = [_Load(e, e.running, e.waiting, e.kv) for e in engines]
    planned = _from_queues(loads, inside, choice, settings)
    return planned or _from_fast_to_slow(loads, inside, settings)


def _from_queues(
    loads: Sequence[_Load],
    inside: Callable[[str], Iterable[Movable]],
    choice: Choice,
    settings: MigrationSettings,
) -> list[tuple[str, str, str]]:
    planned: list[tuple[str, str, str]] = []
    crowded = [load for load in loads if load.waiting > settings.waiting_above]
    if not crowded:
        return planned
    others = sorted(
        (load for load in loads if not load.waiting),
        key=lambda load: (load.running, load.engine.name),
    )
    for source in sorted(crowded, key=lambda load: (-load.waiting, load.engine.name)):
        for call in _cheapest(inside(source.engine.name)):
            if source.waiting <= settings.waiting_above or len(planned) >= settings.at_once:
                break
            like = [load for load in others if load.engine.aside == source.engine.aside]
            target = next((load for load in like if load.takes(call, choice)), None)
            if target is None:
                break
            _plan(source, target, call, planned)
            source.waiting -= 1
            others.sort(key=lambda load: (load.running, load.engine.name))
    return planned


def _from_fast_to_slow(
    loads: Sequence[_Load], inside: Callable[[str], Iterable[Movable]], settings: MigrationSettings
) -> list[tuple[str, str, str]]:
    planned: list[tuple[str, str, str]] = []
    regular = [load for load in loads if not load.engine.aside]
    if len(regular) < 2:
        return planned
    fast = max(regular, key=lambda load: (load.rate(), load.engine.name))
    slow = min(regular, key=lambda load: (load.rate(), load.engine.name))
    if fast.rate() <= settings.gap_above * slow.rate() or fast.running < 2:
        return planned
    for call in _cheapest(inside(fast.engine.name)):
        if len(planned) >= settings.at_once or fast.rate() <= settings.gap_until * slow.rate():
            break
        if slow.engine.version < call.version:
            continue
        before = fast.rate() + slow.rate()
        if fast.rate(-1, -call.length) + slow.rate(1, call.length) <= before:
            break
        _plan(fast, slow, call, planned)
    return planned


def _cheapest(calls: Iterable[Movable]) -> list[Movable]:
    newest_first = list(calls)[::-1]
    return sorted(newest_first, key=lambda call: call.length)


def _plan(source: _Load, target: _Load, call: Movable, planned: list[tuple[str, str, str]]) -> None:
    planned.append((call.call, source.engine.name, target.engine.name))
    source.running, source.kv = source.running - 1, max(0, source.kv - call.length)
    target.running, target.kv = target.running + 1, target.kv + call.length
