"""The state of a ledger of groups: its settings, its groups, and the entries of its buffers.

`Entries` records which group holds which entry of which buffer, and keeps the empty ones as early as possible (`fill`).
`staleflow.py` decides when a group is settled, and which buffers a new group may use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from headgate.rewards import all_equal
from scheduler.policies.staleness_events import (
    BufferReady,
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
BufferState = Literal["PENDING", "READY", "READY_WITH_CAPACITY", "STUCK"]
LateAction = Literal["cancel", "drop", "mask", "overtake"]
GroupDropReason = Literal["too_few_rewards", "nothing_to_train", "zero_variance"]
"""Why a settled group is dropped."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Raise ValueError on impossible values."""

    eta: int
    """The number of versions that a group may be older than the version trained on it."""
    batch: int
    """Groups that a buffer is trained on."""
    min_members: int = 2
    """Rewarded members that make a group worth training; for a smaller group, all of them."""
    spare_groups: int = 0
    """Groups that may race for a buffer beyond `batch`: the first `batch` to finish are trained."""
    spare_members: int = 0
    """Members that may race in a group beyond its size: the first `size` to be rewarded are trained."""
    drop_equal: bool = False
    """Drop a group whose rewards are all equal."""
    equal_within: float = 0.0
    """The share of their size by which equal rewards may differ. A ledger keeps the value that it was begun with."""
    equal_size: float = 0.0
    """The least size of rewards; see `all_equal`. A ledger keeps the value that it was begun with."""
    late_groups: LateAction = "cancel"
    """The treatment of a group that misses its last buffer: dropped and aborted (`cancel`), dropped but not aborted
    (`drop`), or trained in a later buffer with its too old tokens masked (`mask`). `overtake`: as `mask`, and a group that
    finishes takes the earliest place of those that still run, so that no buffer waits for a long group."""
    stuck_groups: int = 4
    """A buffer that lacks more groups than this is not stuck: `Unstick` is refused."""

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
class BufferRow:
    """The state of a buffer.

    PENDING: it has empty entries. STUCK: it has none, but not enough of them are occupied. READY and READY_WITH_CAPACITY: it is
    complete, without or with unused entries.
    """

    buffer: int
    state: BufferState
    occupied: int
    reserved: int
    leased: bool


@dataclass(slots=True)
class GroupRow:
    """A group. `buffer` is the last one in which it had an entry."""

    group_id: str
    size: int
    version: int
    buffer: int
    state: GroupState = "reserved"
    closed: bool = False
    members: dict[str, MemberState] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    """The rewards of members whose `Reward` had a value."""
    untrainable: set[str] = field(default_factory=set)
    """The rewarded members of which no token can be trained."""
    late: bool = False
    """`buffer` is beyond its bound: its tokens of versions before `buffer` - eta are to be masked."""

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
class Buffer:
    """The holders of a buffer's entries, by id, in order of entry."""

    reserved: dict[str, GroupRow] = field(default_factory=dict)
    occupied: dict[str, GroupRow] = field(default_factory=dict)
    truncated: bool = False
    """True once the buffer is complete with the groups that it has."""


class Entries:
    """The entries of all buffers: `batch + spare_groups` each, of which at most `batch` are occupied."""

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self._buffers: dict[int, Buffer] = {}

    # Queries

    def at(self, buffer: int) -> Buffer:
        """Return the buffer's holders, to be read only."""
        return self._buffers.get(buffer, Buffer())

    def complete(self, buffer: int) -> bool:
        """Return true if the buffer gets no more groups."""
        at = self.at(buffer)
        return at.truncated or len(at.occupied) == self._settings.batch

    def empty(self, buffer: int) -> int:
        """Return the number of free entries; none once the buffer is complete."""
        return 0 if self.complete(buffer) else self._left(buffer)

    def last(self) -> int:
        """Return the last buffer that was ever used, or -1."""
        return max(self._buffers, default=-1)

    def reserved(self) -> list[GroupRow]:
        """Return every reserved group, the oldest version first."""
        groups = (group for _, at in sorted(self._buffers.items()) for group in at.reserved.values())
        return sorted(groups, key=lambda group: group.version)

    def end(self, group: GroupRow) -> int:
        """Return the last buffer that the group may be trained in."""
        return group.buffer if group.late else group.version + self._settings.eta

    def movable(self, buffer: int, to: int) -> GroupRow | None:
        """Return the youngest reserved group of `buffer` that may be trained in `to`: it will probably finish last."""
        anywhere = self._settings.late_groups == "overtake"
        legal = [group for group in self.at(buffer).reserved.values() if anywhere or to <= self.end(group)]
        return max(legal, key=lambda group: group.version, default=None)

    def youngest(self, buffer: int) -> GroupRow:
        """Return the reserved group of `buffer` that was started last. Raise ValueError if there is none."""
        return max(reversed(self.at(buffer).reserved.values()), key=lambda group: group.version)

    def row(self, buffer: int, leased: bool) -> BufferRow:
        """Return the state of a buffer."""
        at, left = self.at(buffer), self._left(buffer)
        state: BufferState = "PENDING" if left else "STUCK"
        if self.complete(buffer):
            state = "READY_WITH_CAPACITY" if left else "READY"
        return BufferRow(buffer, state, len(at.occupied), len(at.reserved), leased)

    # Changes

    def reserve(self, group: GroupRow, buffer: int) -> None:
        """Give an entry of `buffer` to a group that holds none."""
        self._open(buffer).reserved[group.group_id] = group
        group.buffer = buffer

    def leave(self, group: GroupRow) -> None:
        """Free the entry that a group reserved, if its buffer was neither consumed nor skipped."""
        self.at(group.buffer).reserved.pop(group.group_id, None)

    def occupy(self, group: GroupRow, buffer: int) -> list[Command]:
        """Give an entry of `buffer` permanently to a group that holds none."""
        occupied = self._open(buffer).occupied
        occupied[group.group_id] = group
        group.buffer, group.state = buffer, "occupied"
        group.late = buffer > group.version + self._settings.eta
        commands: list[Command] = [Occupied(group.group_id, buffer, len(occupied) - 1)]
        return [*commands, BufferReady(buffer)] if self.complete(buffer) else commands

    def truncate(self, buffer: int) -> BufferReady:
        """Make the buffer complete with the groups that it has."""
        self._open(buffer).truncated = True
        return BufferReady(buffer)

    def move(self, group: GroupRow, to: int) -> Moved | OverBound:
        """Give a reserved group an entry of `to` in place of its own."""
        before = group.buffer
        self.leave(group)
        self.reserve(group, to)
        group.late = to > group.version + self._settings.eta
        return (OverBound if group.late else Moved)(group.group_id, before, to)

    def fill(self, gap: int) -> list[Command]:
        """Move reserved groups later until the entry that became empty in `gap` is as early as it can be.

        Groups reserved in complete buffers go last, because they leave no entry to others.
        """
        commands: list[Command] = []
        while self.empty(gap):
            group = self._first_movable(self._before(gap), gap)
            if group is None:
                break
            gap, filled = group.buffer, gap
            commands.append(self.move(group, filled))
        return commands

    def forget_before(self, first: int) -> list[Buffer]:
        """Remove all buffers before `first` and return them in order."""
        return [self._buffers.pop(b) for b in sorted(self._buffers) if b < first]

    def _before(self, gap: int) -> list[int]:
        return sorted((b for b in self._buffers if b < gap), key=lambda b: (self.complete(b), b))

    def _first_movable(self, buffers: Iterable[int], to: int) -> GroupRow | None:
        return next((group for b in buffers if (group := self.movable(b, to))), None)

    def _left(self, buffer: int) -> int:
        at = self.at(buffer)
        return self._settings.batch + self._settings.spare_groups - len(at.reserved) - len(at.occupied)

    def _open(self, buffer: int) -> Buffer:
        return self._buffers.setdefault(buffer, Buffer())
