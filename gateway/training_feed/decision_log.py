"""Decisions about groups and episodes, derived from the ledger's events and commands.

Depends on these alone, so it is the same after a restart. Owns the groups that are not over: their
members, rewards and batches. Invariant: every accepted event produces at least one decision, in the transaction that makes it
true; only `Publish`, `Leased` and `Returned`, which concern no single group, may produce none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.store.decisions import Decision
from scheduler.policies.staleness_events import (
    AbortEpisode,
    Admit,
    BatchReady,
    CloseGroup,
    Command,
    Consumed,
    Event,
    Grading,
    GroupDropped,
    MemberDropped,
    Moved,
    Occupied,
    OverBound,
    Refuse,
    Reward,
    Skipped,
)


@dataclass(slots=True)
class Totals:
    """The outcomes of a ledger's groups since its beginning: a function of its events alone, so the same after a restart."""

    rewards: int = 0
    """Episodes that were rewarded, whatever became of their groups."""
    reward_sum: float = 0.0
    groups: Counter[str] = field(default_factory=Counter)
    """Groups that are over: `batch` for those that got a place in a batch, else the reason why they were dropped."""

    def rewarded(self, value: float | None) -> None:
        """Count a reward; None: its value was not recorded."""
        if value is not None:
            self.rewards += 1
            self.reward_sum += value

    def to_json(self) -> dict[str, Any]:
        """Return the totals as a JSON object."""
        return {"rewards": self.rewards, "reward_sum": self.reward_sum, "groups": dict(self.groups)}


@dataclass(slots=True)
class Entry:
    """A group as a batch has it. `batch` is -1 until it is in one."""

    group_id: str
    version: int
    batch: int = -1
    rewarded: list[str] = field(default_factory=list)
    """The episodes that the group is trained on, in the order of their rewards."""
    joined: list[str] = field(default_factory=list)


class DecisionLog:
    """The groups that are not over."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._entries: dict[str, Entry] = {}
        self._group_of: dict[str, str] = {}

    def entries(self, group_ids: Iterable[str]) -> list[Entry]:
        """Group that are not over. Raise KeyError."""
        return [self._entries[group_id] for group_id in group_ids]

    def has(self, episode_id: str) -> bool:
        """Return true if an episode is in a group that is not over."""
        return episode_id in self._group_of

    def record(self, event: Event, commands: Sequence[Command]) -> list[Decision]:
        """Return the decisions that follow from an accepted event and its commands."""
        decisions = [*self._of_event(event), *(d for command in commands for d in self._of(command))]
        for command in commands:
            match command:
                case Consumed(group_ids=over) | Skipped(group_ids=over):
                    self._forget(over)
                case GroupDropped(group_id):
                    self._forget((group_id,))
        return decisions

    def _of_event(self, event: Event) -> Iterator[Decision]:
        match event:
            case Reward(episode_id, value):
                group_id = self._group_of[episode_id]
                self._entries[group_id].rewarded.append(episode_id)
                self.totals.rewarded(value)
                yield Decision("rewarded", group_id, episode_id, details={"value": value})
            case CloseGroup(group_id, reason) if group_id in self._entries:
                yield Decision("closed", group_id, reason=reason)

    def _of(self, command: Command) -> Iterator[Decision]:
        match command:
            case Admit(episode_id, group_id, batch, version):
                self._entries.setdefault(group_id, Entry(group_id, version)).joined.append(episode_id)
                self._group_of[episode_id] = group_id
                yield Decision("admitted", group_id, episode_id, batch=batch, details={"version": version})
            case Grading(episode_id):
                yield Decision("finished", self._group_of[episode_id], episode_id)
            case MemberDropped(episode_id, reason):
                yield Decision("dropped", self._group_of[episode_id], episode_id, reason)
            case AbortEpisode(episode_id, reason):
                yield Decision("aborted", self._group_of[episode_id], episode_id, reason)
            case GroupDropped(group_id, reason):
                self.totals.groups[reason] += 1
                yield Decision("dropped", group_id, reason=reason)
            case Moved(group_id, before, after):
                yield Decision("moved", group_id, batch=after, details={"from": before})
            case OverBound(group_id, before, after):
                yield Decision("late", group_id, batch=after, details={"from": before})
            case Occupied(group_id, batch, entry):
                self.totals.groups["batch"] += self._entries[group_id].batch < 0
                self._entries[group_id].batch = batch
                yield Decision("occupied", group_id, batch=batch, entry=entry)
            case Consumed(batch, group_ids):
                for index, entry_ in enumerate(self.entries(group_ids)):
                    kept = {"version": entry_.version, "episodes": list(entry_.rewarded)}
                    yield Decision("trained", entry_.group_id, batch=batch, entry=index, details=kept)
            case Skipped(first, until, group_ids):
                for entry_ in self.entries(group_ids):
                    passed = {"first": first, "until": until}
                    yield Decision("skipped", entry_.group_id, "", "skipped", entry_.batch, details=passed)
            case BatchReady() | Refuse():
                pass

    def _forget(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            for episode_id in self._entries.pop(group_id).joined:
                del self._group_of[episode_id]
