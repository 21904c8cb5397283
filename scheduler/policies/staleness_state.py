"""The state of a ledger of groups: its settings, its groups, and the entries of its batches.

`Entries` records which group holds which entry of which batch, and keeps the empty ones as early as possible (`fill`).
`staleflow.py` decides when a group is settled, and which batches a new group may use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from headgate.rewards import all_equal
from scheduler.policies.staleness_events import (
    BatchReady,
    Command,
    Drop,
    Finish,
    Grading,
    MemberDropped,
    Moved,
    Occupied,
    OverBound,
    Refuse,
    RefuseReason,
    Reward,
)

GroupState = Literal["reserved", "occupied", "dropped"]
MemberState = Literal["open", "grading", "rewarded", "dropped"]
BatchState = Literal["PENDING", "READY", "READY_WITH_CAPACITY", "STUCK"]
LateAction = Literal["cancel", "drop", "mask", "overtake"]
GroupDropReason = Literal["too_few_rewards", "nothing_to_train", "zero_variance"]
"""Why a settled group is dropped."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Raise ValueError on impossible values."""

    eta: int
    """The number of versions that a group may be older than the version trained on it."""
    batch: int
    """Groups of a batch."""
    min_members: int = 2
    """Rewarded members that make a group worth training; for a smaller group, all of them."""
    spare_groups: int = 0
    """Groups that may race for a batch beyond `batch`: the first `batch` to finish are trained."""
    spare_members: int = 0
    """Members that may race in a group beyond its size: the first `size` to be rewarded are trained."""
    drop_equal: bool = False
    """Drop a group whose rewards are all equal."""
    equal_within: float = 0.0
    """The share of their size by which equal rewards may differ. A ledger keeps the value that it was begun with."""
    equal_size: float = 0.0
    """The least size of rewards; see `all_equal`. A ledger keeps the value that it was begun with."""
    late_groups: LateAction = "cancel"
    """The treatment of a group that misses its last batch: dropped and aborted (`cancel`), dropped but not aborted
    (`drop`), or trained in a later batch with its too old tokens masked (`mask`). `overtake`: as `mask`, and a group that
    finishes takes the earliest place of those that still run, so that no batch waits for a long group."""
    stuck_groups: int = 4
    """A batch that lacks more groups than this is not stuck: `Unstick` is refused."""

    def __post_init__(self) -> None:
        if self.eta < 0 or self.batch < 1 or self.min_members < 1:
            raise ValueError(f"eta must be >= 0, batch and min_members >= 1: {self}")
        if self.spare_groups < 0 or self.spare_members < 0 or self.stuck_groups < 1:
            raise ValueError(f"spare_groups and spare_members must be >= 0, stuck_groups >= 1: {self}")
        if self.late_groups not in get_args(LateAction):
            raise ValueError(f"late_groups must be one of {', '.join(get_args(LateAction))}: {self}")
        if self.late_groups == "overtake" and self.spare_groups:
            raise ValueError(
                "spare_groups must be 0 with late_groups = 'overtake', under which all groups race for the next batch"
            )

    @property
    def masks(self) -> bool:
        """True if a group may be trained beyond its bound, with its too old tokens masked."""
        return self.late_groups in ("mask", "overtake")


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The state of a batch.

    PENDING: it has empty entries. STUCK: it has none, but not enough of them are occupied. READY and READY_WITH_CAPACITY: it is
    complete, without or with unused entries.
    """

    batch: int
    state: BatchState
    occupied: int
    reserved: int
    leased: bool


@dataclass(slots=True)
class GroupRow:
    """A group. `batch` is the last one in which it had an entry."""

    group_id: str
    size: int
    version: int
    batch: int
    state: GroupState = "reserved"
    closed: bool = False
    members: dict[str, MemberState] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    """The rewards of members whose `Reward` had a value."""
    untrainable: set[str] = field(default_factory=set)
    """The rewarded members of which no token can be trained."""
    late: bool = False
    """`batch` is beyond its bound: its tokens of versions before `batch` - eta are to be masked."""

    def apply(self, event: Finish | Reward | Drop) -> list[Command]:
        """Apply an event to its member; a result of [Refuse] alone means that nothing changed. Raise ValueError, and change
        nothing, if a reward is not finite."""
        episode_id, state = event.episode_id, self.members[event.episode_id]
        if isinstance(event, Reward) and not math.isfinite(event.value or 0.0):
            raise ValueError(f"a reward is a finite number, not {event.value}: {episode_id}")
        if self.state != "reserved":
            return [Refuse(episode_id, "group_finished")]
        if state != "open" and (state != "grading" or isinstance(event, Finish)):
            return [Refuse(episode_id, "episode_finished")]
        match event:
            case Finish():
                self.members[episode_id] = "grading"
                return [Grading(episode_id)]
            case Reward(_, value, trainable):
                self.members[episode_id] = "rewarded"
                if not trainable:
                    self.untrainable.add(episode_id)
                if value is not None:
                    self.values[episode_id] = value
                return []
            case Drop(_, reason):
                self.members[episode_id] = "dropped"
                return [MemberDropped(episode_id, reason)]

    def join_refusal(self, size: int, spare_members: int = 0) -> RefuseReason | None:
        """Return the reason why no further member may join a group of `size`; None if one may."""
        if self.state != "reserved":
            return "group_finished"
        if self.size != size:
            return "size_differs"
        if len(self.members) == self.size + spare_members:
            return "group_full"
        return "group_closed" if self.closed else None

    def settled(self, spare_members: int = 0) -> bool:
        """Return true if `size` members are rewarded, or no member is missing or running."""
        whole = self.closed or len(self.members) == self.size + spare_members
        return self.rewarded() == self.size or (whole and not self.running())

    def running(self) -> list[str]:
        """Return the members that run or are graded."""
        return [episode_id for episode_id, state in self.members.items() if state in ("open", "grading")]

    def rewarded(self) -> int:
        """Return the number of members with a reward."""
        return list(self.members.values()).count("rewarded")

    def worthless(self, settings: LedgerSettings) -> GroupDropReason | None:
        """Return the reason why the settled group cannot teach anything; None if it can."""
        if self.rewarded() < min(settings.min_members, self.size):
            return "too_few_rewards"
        if self.rewarded() == len(self.untrainable):
            return "nothing_to_train"
        if settings.drop_equal and self.equal(settings.equal_within, settings.equal_size):
            return "zero_variance"
        return None

    def equal(self, within: float, size: float) -> bool:
        """Return true if at least two members are rewarded, all with one value except for rounding (`equal_within`,
        `equal_size`)."""
        return self.rewarded() == len(self.values) >= 2 and all_equal(self.values.values(), within, size)


@dataclass(slots=True)
class Batch:
    """The holders of a batch's entries, by id, in order of entry."""

    reserved: dict[str, GroupRow] = field(default_factory=dict)
    occupied: dict[str, GroupRow] = field(default_factory=dict)
    truncated: bool = False
    """True once the batch is complete with the groups that it has."""


class Entries:
    """The entries of all batches: `batch + spare_groups` each, of which at most `batch` are occupied."""

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self._batches: dict[int, Batch] = {}

    # Queries

    def at(self, batch: int) -> Batch:
        """Return the batch's holders, to be read only."""
        return self._batches.get(batch, Batch())

    def complete(self, batch: int) -> bool:
        """Return true if the batch gets no more groups."""
        at = self.at(batch)
        return at.truncated or len(at.occupied) == self._settings.batch

    def empty(self, batch: int) -> int:
        """Return the number of free entries; none once the batch is complete."""
        return 0 if self.complete(batch) else self._left(batch)

    def last(self) -> int:
        """Return the last batch that was ever used, or -1."""
        return max(self._batches, default=-1)

    def reserved(self) -> list[GroupRow]:
        """Return every reserved group, the oldest version first."""
        groups = (group for _, at in sorted(self._batches.items()) for group in at.reserved.values())
        return sorted(groups, key=lambda group: group.version)

    def end(self, group: GroupRow) -> int:
        """Return the last batch that the group may be trained in."""
        return group.batch if group.late else group.version + self._settings.eta

    def movable(self, batch: int, to: int) -> GroupRow | None:
        """Return the youngest reserved group of `batch` that may be trained in `to`: it will probably finish last."""
        anywhere = self._settings.late_groups == "overtake"
        legal = [group for group in self.at(batch).reserved.values() if anywhere or to <= self.end(group)]
        return max(legal, key=lambda group: group.version, default=None)

    def youngest(self, batch: int) -> GroupRow:
        """Return the reserved group of `batch` that was started last. Raise ValueError if there is none."""
        return max(reversed(self.at(batch).reserved.values()), key=lambda group: group.version)

    def row(self, batch: int, leased: bool) -> BatchRow:
        """Return the state of a batch."""
        at, left = self.at(batch), self._left(batch)
        state: BatchState = "PENDING" if left else "STUCK"
        if self.complete(batch):
            state = "READY_WITH_CAPACITY" if left else "READY"
        return BatchRow(batch, state, len(at.occupied), len(at.reserved), leased)

    # Changes

    def reserve(self, group: GroupRow, batch: int) -> None:
        """Give an entry of `batch` to a group that holds none."""
        self._open(batch).reserved[group.group_id] = group
        group.batch = batch

    def leave(self, group: GroupRow) -> None:
        """Free the entry that a group reserved, if its batch was neither consumed nor skipped."""
        self.at(group.batch).reserved.pop(group.group_id, None)

    def occupy(self, group: GroupRow, batch: int) -> list[Command]:
        """Give an entry of `batch` permanently to a group that holds none."""
        occupied = self._open(batch).occupied
        occupied[group.group_id] = group
        group.batch, group.state = batch, "occupied"
        group.late = batch > group.version + self._settings.eta
        commands: list[Command] = [Occupied(group.group_id, batch, len(occupied) - 1)]
        return [*commands, BatchReady(batch)] if self.complete(batch) else commands

    def truncate(self, batch: int) -> BatchReady:
        """Make the batch complete with the groups that it has."""
        self._open(batch).truncated = True
        return BatchReady(batch)

    def move(self, group: GroupRow, to: int) -> Moved | OverBound:
        """Give a reserved group an entry of `to` in place of its own."""
        before = group.batch
        self.leave(group)
        self.reserve(group, to)
        group.late = to > group.version + self._settings.eta
        return (OverBound if group.late else Moved)(group.group_id, before, to)

    def fill(self, gap: int) -> list[Command]:
        """Move reserved groups later until the entry that became empty in `gap` is as early as it can be.

        Groups reserved in complete batches go last, because they leave no entry to others.
        """
        commands: list[Command] = []
        while self.empty(gap):
            group = self._first_movable(self._before(gap), gap)
            if group is None:
                break
            gap, filled = group.batch, gap
            commands.append(self.move(group, filled))
        return commands

    def forget_before(self, first: int) -> list[Batch]:
        """Remove all batches before `first` and return them in order."""
        return [self._batches.pop(b) for b in sorted(self._batches) if b < first]

    def _before(self, gap: int) -> list[int]:
        return sorted((b for b in self._batches if b < gap), key=lambda b: (self.complete(b), b))

    def _first_movable(self, batches: Iterable[int], to: int) -> GroupRow | None:
        return next((group for b in batches if (group := self.movable(b, to))), None)

    def _left(self, batch: int) -> int:
        at = self.at(batch)
        return self._settings.batch + self._settings.spare_groups - len(at.reserved) - len(at.occupied)

    def _open(self, batch: int) -> Batch:
        return self._batches.setdefault(batch, Batch())
