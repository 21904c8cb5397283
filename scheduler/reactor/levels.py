"""The reaction precedence graph: which reaction must wait for which at one tag.

An edge leads from a reaction to the next one of its reactor, and from a writer to every reaction that sees the value at the
same tag. A reaction's level is the longest way to it, so reactions of one level have nothing to do with each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from scheduler.reactor.elements import Connection, Reaction, TopologyError


def assign_levels(reactions: Sequence[Reaction], connections: Sequence[Connection]) -> None:
    """Set every reaction's level. Raise TopologyError, which names the cycle, if there is one."""
    after: dict[Reaction, list[tuple[Reaction, str]]] = {reaction: [] for reaction in reactions}
    waits = dict.fromkeys(reactions, 0)
    for first, second, reason in _edges(reactions, connections):
        after[first].append((second, reason))
        waits[second] += 1
    levels = dict.fromkeys(reactions, 0)
    ready = [reaction for reaction in reactions if not waits[reaction]]
    for reaction in ready:
        for follower, _ in after[reaction]:
            levels[follower] = max(levels[follower], levels[reaction] + 1)
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    if len(ready) < len(reactions):
        _refuse(after, [reaction for reaction in reactions if waits[reaction]])
    for reaction, level in levels.items():
        reaction.level = level


def _edges(
    reactions: Sequence[Reaction], connections: Sequence[Connection]
) -> Iterator[tuple[Reaction, Reaction, str]]:
    for first, second in itertools.pairwise(reactions):
        if first.reactor == second.reactor:
            yield first, second, "declared before"
    writers: dict[Any, list[Reaction]] = {}
    for reaction in reactions:
        for effect in reaction.writes:
            writers.setdefault(effect, []).append(reaction)
    for connection in connections:
        if connection.after is None:
            reason = f"{connection.source.path} -> {connection.target.path}"
            for writer in writers.get(connection.source, []):
                for reader in reactions:
                    if connection.target in reader.sources:
                        yield writer, reader, reason


def _refuse(after: dict[Reaction, list[tuple[Reaction, str]]], stuck: list[Reaction]) -> None:
    """Everything in `stuck` waits for something in it: going backwards in it must come around."""
    before = {r: [(w, reason) for w in stuck for f, reason in after[w] if f is r] for r in stuck}
    way: list[Reaction] = []
    reasons: list[str] = []
    here = stuck[0]
    while here not in way:
        way.append(here)
        here, reason = before[here][0]
        reasons.append(reason)
    start = way.index(here)
    steps = [here.path]
    for reaction, reason in zip(reversed(way[start:]), reversed(reasons[start:]), strict=True):
        steps.append(f"[{reason}] {reaction.path}")
    raise TopologyError(f"{' '.join(steps)}: a cycle; give one of its connections a delay (after=0 or more)")
