"""Which group may start, and which batch it will be trained in: Reserve, Occupy, Consume of StaleFlow (arXiv 2601.12784).

Buffer b is the batch on which version b is trained to give b + 1; it has `batch` entries, one per group. A group that
starts while version V is the newest has V for good, and may be trained in no buffer outside its *window* [V, V + eta].

- **Reserve**: the first episode of a group takes an empty entry of the *latest* buffer of the window. None: no start.
- **Occupy**: a group whose members are all settled takes the *earliest* buffer of its window that it can get.
- **Consume**: the trainer takes buffer `consumed` once every entry of it is occupied.

Owns the state of all three and nothing else: `apply` depends on the state and the event alone, so the events, replayed in
their order, give the state again (under the same settings). An event that raises ValueError or is answered by `Refuse`
changes nothing and need not be kept.

Invariants, after every event:
- reserved plus occupied entries of a buffer never exceed `batch`;
- a reserved group's buffer lies in its window and is not consumed, so it can be trained there whatever the others do;
- no reserved group has an empty entry in a later buffer of its window: empty entries are as early as they can be, where
  groups that finish first need them. `Moved` restores this whenever an entry is freed, and moves a group later only;
- a group occupies a buffer in its window that is not later than the one that it holds reserved at that moment (the target
  of its last `Moved`, else of its `Admit`). An occupied entry never changes again;
- `consumed >= version`, unless buffer `consumed` is leased and full: it has been trained and waits for its `Consume`.

Of the last one: a version can be published without the buffer before it having been trained (a first version above 0; a
trainer that went back to a checkpoint, since a version number is used once only). No group can start for such a buffer any
more and training would never reach it. `Skipped` passes it over: its occupied groups are lost and its reserved ones are
dropped. That is the only way in which a group becomes stale: when a buffer is consumed, everything else lies in later ones.

Memory: a group that occupied is forgotten when its buffer is consumed or skipped, a dropped one when `DROPPED_KEPT` newer
ones were dropped. After that a `Join` with its id starts a new group and its episodes are unknown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, assert_never

from scheduler.policies.staleness_events import (
    AbortEpisode,
    Admit,
    BufferReady,
    CloseGroup,
    Command,
    Consume,
    Consumed,
    Drop,
    Event,
    Finish,
    GroupDropped,
    Join,
    Leased,
    MemberDropped,
    Moved,
    Occupied,
    Publish,
    Refuse,
    RefuseReason,
    Reward,
    Skipped,
    Unstick,
)
from scheduler.policies.staleness_events import command_to_json as command_to_json
from scheduler.policies.staleness_events import event_from_json as event_from_json
from scheduler.policies.staleness_events import event_to_json as event_to_json

DROPPED_KEPT = 1024

GroupState = Literal["reserved", "occupied", "dropped"]
MemberState = Literal["open", "rewarded", "dropped"]
BufferState = Literal["PENDING", "READY", "STUCK"]


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Raises ValueError on impossible values."""

    eta: int
    """How many versions a group may be older than the version trained on it."""
    batch: int
    """Groups per buffer."""
    min_members: int = 2
    """Rewarded members that make a group worth training; for a smaller group, all of them."""

    def __post_init__(self) -> None:
        if self.eta < 0 or self.batch < 1 or self.min_members < 1:
            raise ValueError(f"eta must be >= 0, batch and min_members >= 1: {self}")


# State


@dataclass(frozen=True, slots=True)
class BufferRow:
    """A buffer as `Ledger.buffers` shows it. PENDING has empty entries; STUCK is full, but not all of it is occupied."""

    buffer: int
    state: BufferState
    occupied: int
    reserved: int
    leased: bool


@dataclass(slots=True)
class GroupRow:
    """A group: what the ledger knows of it. `buffer` is the last one that it held."""

    group_id: str
    size: int
    version: int
    buffer: int
    state: GroupState = "reserved"
    closed: bool = False
    members: dict[str, MemberState] = field(default_factory=dict)

    def settled(self) -> bool:
        """No member is missing or still running."""
        whole = self.closed or len(self.members) == self.size
        return whole and "open" not in self.members.values()

    def rewarded(self) -> int:
        """How many members have a reward."""
        return list(self.members.values()).count("rewarded")


@dataclass(slots=True)
class _Buffer:
    reserved: list[str] = field(default_factory=list)
    occupied: list[str] = field(default_factory=list)


class Ledger:
    """The reservations of all groups. `version`: the newest published; `consumed`: the next buffer to train."""

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.version = 0
        self.consumed = 0
        self.leased = False
        self._buffers: dict[int, _Buffer] = {}
        self._groups: dict[str, GroupRow] = {}
        self._dropped: list[str] = []
        self._group_of: dict[str, str] = {}

    def apply(self, event: Event) -> list[Command]:
        """Changes the state by `event`. Raises ValueError, and changes nothing, if the event is impossible."""
        match event:
            case Join():
                return self._join(event)
            case Reward(episode_id, _):
                return self._settle(episode_id, "rewarded")
            case Drop(episode_id, reason):
                return self._settle(episode_id, "dropped", reason)
            case Finish() | Unstick():
                raise NotImplementedError(event)
            case CloseGroup(group_id):
                return self._close(group_id)
            case Leased(buffer):
                return self._lease(buffer)
            case Consume(buffer):
                return self._consume(buffer)
            case Publish(version):
                return self._publish(version)
            case _:
                assert_never(event)

    def to_json(self) -> dict[str, Any]:
        """The whole state and the settings."""
        return {
            "settings": asdict(self.settings),
            "version": self.version,
            "consumed": self.consumed,
            "leased": self.leased,
            "buffers": [[b, asdict(buffer)] for b, buffer in sorted(self._buffers.items())],
            "groups": [asdict(group) for group in self._groups.values()],
            "dropped": list(self._dropped),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        ledger = cls(LedgerSettings(**value["settings"]))
        ledger.version, ledger.consumed = value["version"], value["consumed"]
        ledger.leased = value["leased"]
        ledger._buffers = {b: _Buffer(**buffer) for b, buffer in value["buffers"]}
        ledger._groups = {group["group_id"]: GroupRow(**group) for group in value["groups"]}
        ledger._dropped = list(value["dropped"])
        ledger._group_of = {e: g.group_id for g in ledger._groups.values() for e in g.members}
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.to_json() == other.to_json()

    # Queries

    def buffers(self) -> list[BufferRow]:
        """Every buffer that is not consumed and can hold something, in order."""
        last = max([self.version + self.settings.eta, *self._buffers])
        return [self._row(b) for b in range(self.consumed, last + 1)]

    def groups(self) -> list[GroupRow]:
        """Every group that is not forgotten, in order of reservation. To be read only."""
        return list(self._groups.values())

    def entries(self, buffer: int) -> tuple[str, ...]:
        """The groups that occupy `buffer`, in order of entry; none once it is consumed."""
        return tuple(self._buffers.get(buffer, _Buffer()).occupied)

    def complete(self, buffer: int) -> bool:
        """Whether no group will be added to the buffer: it can be trained."""
        return self._ready(buffer)

    def free_slots(self) -> int:
        """How many new groups could start now."""
        return sum(self._empty(b) for b in self._window())

    # Reserve

    def _join(self, event: Join) -> list[Command]:
        if event.size < 1:
            raise ValueError(f"a group of {event.size} members: {event.group_id}")
        if event.episode_id in self._group_of:
            raise ValueError(f"episode {event.episode_id} has joined before")
        group = self._groups.get(event.group_id)
        if group is None:
            buffer = self._latest_empty()
            if buffer is None:
                return [Refuse(event.episode_id, "no_slot")]
            group = GroupRow(event.group_id, event.size, self.version, buffer)
            self._groups[event.group_id] = group
            self._buffer(buffer).reserved.append(event.group_id)
        elif reason := _join_refusal(group, event.size):
            return [Refuse(event.episode_id, reason)]
        group.members[event.episode_id] = "open"
        self._group_of[event.episode_id] = event.group_id
        return [Admit(event.episode_id, event.group_id, group.buffer, group.version)]

    # Occupy

    def _settle(self, episode_id: str, state: MemberState, reason: str = "") -> list[Command]:
        if episode_id not in self._group_of:
            raise ValueError(f"no episode {episode_id}")
        group = self._groups[self._group_of[episode_id]]
        if group.state != "reserved":
            return [Refuse(episode_id, "group_finished")]
        if group.members[episode_id] != "open":
            return [Refuse(episode_id, "episode_finished")]
        group.members[episode_id] = state
        fate: list[Command] = [MemberDropped(episode_id, reason)] if state == "dropped" else []
        return fate + self._finish(group)

    def _close(self, group_id: str) -> list[Command]:
        if group_id not in self._groups:
            raise ValueError(f"no group {group_id}")
        group = self._groups[group_id]
        if group.state != "reserved":
            return []
        group.closed = True
        return self._finish(group)

    def _finish(self, group: GroupRow) -> list[Command]:
        if not group.settled():
            return []
        if group.rewarded() < min(self.settings.min_members, group.size):
            return self._drop(group, "too_few_rewards")
        return self._occupy(group)

    def _occupy(self, group: GroupRow) -> list[Command]:
        held = group.buffer
        self._buffer(held).reserved.remove(group.group_id)
        target, commands = self._earliest(group.version, held)
        group.buffer, group.state = target, "occupied"
        occupied = self._buffer(target).occupied
        occupied.append(group.group_id)
        commands.append(Occupied(group.group_id, target, len(occupied) - 1))
        if len(occupied) == self.settings.batch:
            commands.append(BufferReady(target))
        return commands + self._fill(held)

    def _earliest(self, version: int, held: int) -> tuple[int, list[Command]]:
        """The earliest buffer with an empty entry, if need be after a group that may wait moves from it to `held`."""
        for buffer in range(max(version, self.consumed), held):
            if self._empty(buffer):
                return buffer, []
            if other := self._movable(buffer, held):
                return buffer, [self._move(other, held)]
        return held, []

    def _fill(self, gap: int) -> list[Command]:
        """Moves reserved groups later until the entry that became empty in `gap` is as early as it can be."""
        commands: list[Command] = []
        while self._empty(gap):
            earlier = range(self.consumed, gap)
            group = next((g for b in earlier if (g := self._movable(b, gap))), None)
            if group is None:
                break
            gap, filled = group.buffer, gap
            commands.append(self._move(group, filled))
        return commands

    def _movable(self, buffer: int, to: int) -> GroupRow | None:
        """The youngest reserved group of `buffer` whose window reaches `to`: it will probably finish last."""
        reserved = (self._groups[g] for g in self._buffer(buffer).reserved)
        legal = [group for group in reserved if to <= group.version + self.settings.eta]
        return max(legal, key=lambda group: group.version, default=None)

    def _move(self, group: GroupRow, to: int) -> Moved:
        moved = Moved(group.group_id, group.buffer, to)
        self._buffer(group.buffer).reserved.remove(group.group_id)
        self._buffer(to).reserved.append(group.group_id)
        group.buffer = to
        return moved

    def _drop(self, group: GroupRow, reason: str) -> list[Command]:
        self._buffer(group.buffer).reserved.remove(group.group_id)
        group.state = "dropped"
        self._dropped.append(group.group_id)
        if len(self._dropped) > DROPPED_KEPT:
            self._forget(self._dropped.pop(0))
        running = [e for e, state in group.members.items() if state == "open"]
        return [
            GroupDropped(group.group_id, reason),
            *(AbortEpisode(episode_id, reason) for episode_id in running),
            *self._fill(group.buffer),
        ]

    # Consume

    def _lease(self, buffer: int) -> list[Command]:
        if buffer != self.consumed:
            raise ValueError(f"lease of buffer {buffer}: the next to train is {self.consumed}")
        self.leased = True
        return []

    def _consume(self, buffer: int) -> list[Command]:
        if buffer != self.consumed:
            raise ValueError(f"buffer {buffer} trained: the next to train is {self.consumed}")
        if not self._ready(buffer):
            raise ValueError(f"buffer {buffer} trained: it is not ready")
        group_ids = self.entries(buffer)
        self._pass(buffer + 1)
        return [Consumed(buffer, group_ids), *self._skip()]

    def _publish(self, version: int) -> list[Command]:
        if version <= self.version:
            raise ValueError(f"version {version} published after version {self.version}")
        self.version = version
        return self._skip()

    def _skip(self) -> list[Command]:
        """Passes over the buffers before `version`, unless the first of them waits for its `Consume`."""
        first = self.consumed
        if first >= self.version or (self.leased and self._ready(first)):
            return []
        commands: list[Command] = []
        old = [buffer for b, buffer in sorted(self._buffers.items()) if b < self.version]
        lost = tuple(group_id for buffer in old for group_id in buffer.occupied)
        waiting = [group_id for buffer in old for group_id in buffer.reserved]
        self.consumed = self.version
        for group_id in waiting:
            # By the third invariant no later buffer of its window has an empty entry.
            commands += self._drop(self._groups[group_id], "stale")
        self._pass(self.version)
        return [*commands, Skipped(first, self.version, lost)]

    def _pass(self, first: int) -> None:
        self.consumed, self.leased = first, False
        for b in [b for b in self._buffers if b < first]:
            for group_id in self._buffers.pop(b).occupied:
                self._forget(group_id)

    def _forget(self, group_id: str) -> None:
        for episode_id in self._groups.pop(group_id).members:
            del self._group_of[episode_id]

    # Buffers

    def _window(self) -> range:
        return range(max(self.version, self.consumed), self.version + self.settings.eta + 1)

    def _latest_empty(self) -> int | None:
        return next((b for b in reversed(self._window()) if self._empty(b)), None)

    def _buffer(self, buffer: int) -> _Buffer:
        return self._buffers.setdefault(buffer, _Buffer())

    def _empty(self, buffer: int) -> int:
        held = self._buffers.get(buffer, _Buffer())
        return self.settings.batch - len(held.reserved) - len(held.occupied)

    def _ready(self, buffer: int) -> bool:
        return len(self.entries(buffer)) == self.settings.batch

    def _row(self, b: int) -> BufferRow:
        held = self._buffers.get(b, _Buffer())
        state: BufferState = "READY" if self._ready(b) else "PENDING" if self._empty(b) else "STUCK"
        leased = self.leased and b == self.consumed
        return BufferRow(b, state, len(held.occupied), len(held.reserved), leased)


def _join_refusal(group: GroupRow, size: int) -> RefuseReason | None:
    if group.state != "reserved":
        return "group_finished"
    if group.size != size:
        return "size_differs"
    if len(group.members) == group.size:
        return "group_full"
    return "group_closed" if group.closed else None
