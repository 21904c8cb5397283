"""Chooses the engines that pull the newest weights now (StaleFlow, arXiv 2601.12784: synchronization by engine).

An engine that is busy with calls which its weights may sample continues; an under-used one pulls. An engine is under-used when
it runs few calls, or when a call waits for newer weights and would
gain enough there (the hypothetical gain: what the call would add, had the engine the newest weights). Where late calls weigh more
(`placement.py`) it is also under-used when a typical call would gain at least `_BETTER` times as much there as in any engine with
the newest weights: no call waits then, but those engines are crowded, and calls will move. An engine is not under-used while its
own queue has a call that it may sample: that call is about to be placed.

Two rules keep everything going. The first engine pulls as soon as a version is there, so that it is live; the one with least to
do. And while a waiting call has no open engine that may sample it, at least one engine is pulling. Otherwise at most a share
of the engines updates at the same time, not counting engines that run nothing while no waiting call may be sampled by them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scheduler.policies.placement import Choice, EngineRequest, OpenEngine

_BETTER = 1.2


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """Thresholds below which an engine is under-used."""

    running_below: int = 2
    """Fewer calls run in it than these."""
    at_once: float = 0.25
    """The share of the engines that may be on their way together; one always may."""


def pulls(
    engines: Collection[OpenEngine],
    under_way: int,
    target: int,
    heads: Iterable[EngineRequest],
    choice: Choice,
    settings: SyncSettings,
    typical: int = 512,
) -> list[str]:
    """Return the engines that pull version `target` now, those with least to do first.

    `engines`: the open ones, without those that have to pull already; `under_way`: how many engines are on their way to
    `target`; `heads`: the waiting calls whose turn it is, oldest first; `typical`: the running mean of the lengths of calls,
    in tokens.
    """
    behind = sorted((e for e in engines if e.version < target), key=lambda e: (e.rate, e.running, e.name))
    if not behind:
        return []
    heads = list(heads)
    newest = max(engine.version for engine in engines)
    if not under_way and (newest < target or any(request.version > newest for request in heads)):
        return [behind[0].name]
    room = max(1, int(settings.at_once * (len(engines) + under_way))) - under_way
    best = max((engine.gain(typical) for engine in engines if engine.version >= target), default=0.0)
    enough = _BETTER * max(best, 0.0) if choice.weighs else math.inf
    found: list[str] = []
    for engine in behind:
        if any(request.version <= engine.version for request in heads):
            continue  # it is about to get a call
        if heads and not engine.running:
            found.append(engine.name)  # it can do nothing else for the calls that wait
            continue
        if len(found) >= room:
            break
        few = engine.running < settings.running_below
        if (
            few
            or engine.gain(typical) > enough
            or any(_has_room(engine, request, target, choice) for request in heads)
        ):
            found.append(engine.name)
    return found


def _has_room(engine: OpenEngine, request: EngineRequest, target: int, choice: Choice) -> bool:
    return choice.has_room(engine, request.length, choice.weight(target - request.version))
