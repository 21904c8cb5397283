"""The reason why no group may start: which batches are full of what, and what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from scheduler.policies.staleness_base import StalenessRule
from scheduler.policies.staleness_state import BatchRow, GroupRow

_BATCHES = 3
"""Batches that are described one by one."""
NO_SLOT = "no slot is free within the staleness bound"
_TODO = (
    "reward, close or abandon open episodes, or train a batch (`gateway staleness` shows them);"
    ' episodes with mode = "eval" need no slot'
)


def no_slot(rule: StalenessRule[Any]) -> str:
    """Return a sentence about a ledger without a free slot."""
    if rule.next_batch > rule.version + rule.settings.eta:
        batch = rule.next_batch - 1
        return (
            f"{NO_SLOT}: batch {batch} was acknowledged, and the newest live version is {rule.version}; publish version"
            f" {batch + 1} ([staleness] eta = {rule.settings.eta})"
        )
    groups: dict[int, list[GroupRow]] = {}
    for group in rule.groups():
        if group.state != "dropped":
            groups.setdefault(group.batch, []).append(group)
    full = [row for row in rule.batches() if row.occupied + row.reserved]
    batches = [_batch(row, groups.get(row.batch, [])) for row in full[:_BATCHES]]
    if len(full) > _BATCHES:
        batches.append(f"{len(full) - _BATCHES} more batches are full")
    trainer = "a trainer has" if rule.leased else "no trainer has leased"
    return "; ".join([f"{NO_SLOT}: {', '.join(batches)}", f"{trainer} batch {rule.next_batch}", _TODO])


def _batch(row: BatchRow, groups: Sequence[GroupRow]) -> str:
    running = Counter(
        state for group in groups if group.state == "reserved" for state in group.members.values()
    )
    parts = []
    if row.occupied:
        parts.append(_count(row.occupied, "finished group"))
    if row.reserved:
        graded = f", {running['grading']} being graded" if running["grading"] else ""
        episodes = f"{_count(running['open'], 'open episode')}{graded}"
        parts.append(f"{_count(row.reserved, 'unfinished group')} ({episodes})")
    return f"batch {row.batch} has {' and '.join(parts)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
