"""Decides which group may start and which batch it is trained in: Reserve, Occupy, Consume of StaleFlow (arXiv 2601.12784).

Buffer b is the batch on which version b is trained to make version b + 1. It has `batch` entries for groups, and `spare_groups`
more. It is *complete*, and gets no further group, once `batch` groups occupy it or it was truncated. A group's `min_version`
never changes, and the group may be trained only in its *window* of buffers [min_version, min_version + eta]. The `min_version`
is the newest version when the group starts. If the engine that admits the group is older (`Join.version`), it is the engine's
version, or the next one whose window has an empty entry.

- **Reserve**: the first episode of a group reserves an empty entry of the *latest* possible buffer of the window. If there is
  none, the group cannot start.
- **Occupy**: a settled group occupies an entry of the *earliest* possible buffer of its window.
- **Consume**: the trainer consumes buffer `next_buffer` once it is complete, or gives it back (`Returned`).

Redundancy: the first `size` members of a group to be rewarded are trained, and the first `batch` groups to be settled; the others
are *surplus*, and surplus members are aborted. Groups that are still reserved in a complete buffer compete for another buffer of
their window: they get its next empty entry, or, once they are settled, the entry of its youngest group. They are given up when
their buffer is consumed, or when every buffer of their window is complete (*no room*).

Owns the state of all three. `apply` depends on the state and the event alone, so replaying the events in order under the same
settings restores the state. An event that raises ValueError or results in `Refuse` changes nothing and need not be kept.

Invariants, after every event:
- reserved plus occupied entries of a buffer never exceed `batch + spare_groups`, and occupied ones `batch`. Nothing is reserved
  again in a complete buffer;
- a reserved group's buffer is not consumed and lies in its window (unless the group is late, see below), and its window has a
  buffer that is neither consumed nor complete. Without spare groups that is its own, so only `Unstick`, `Skipped` or itself can
  end it;
- no reserved group has an empty entry in a later buffer of its window: empty entries are as early as possible, where groups that
  finish first need them. `Moved` restores this whenever an entry is freed, and only moves groups to later buffers;
- a group occupies a buffer that is not later than the one that it holds reserved at that moment (the target of its last `Moved`
  or `OverBound`, else of its `Admit`), and in its window unless it is late. It keeps that entry unless its buffer is skipped;
- `next_buffer >= version`, unless buffer `next_buffer` is leased and complete: it has been trained and waits for its `Consume`.

On the last invariant: a version can be published although the buffer before it was not trained (a first version above 0; a
trainer that went back to a checkpoint, since each version number is used only once). No group can start for such a buffer any
more, and training would never reach it. `Skipped` skips it: its occupied groups are lost and its reserved ones are dropped.

A group is *late* when no buffer of its window is left for it: they were skipped (`stale`) or are complete (`no_room`). With
`late_groups = "mask"` it gets the earliest empty entry beyond its window, up to the newest version's eta, if there is one. So
does a group that had occupied a skipped buffer. `OverBound` reports this, and the tokens beyond the bound are masked. Otherwise
no group is ever trained beyond the bound: when a buffer is consumed, all other groups are in later buffers.

With `late_groups = "overtake"` the window of a reserved group ends where that of a new group does, so batches consist of groups
in the order in which they finish, and only tokens are bounded. The window grows with every version. The third invariant does not
hold then, and is not needed: without spare groups no group is reserved in a complete buffer.
"""

from __future__ import annotations

from scheduler.policies.staleness_base import StalenessRule
from scheduler.policies.staleness_events import (
    AbortEpisode,
    Command,
    Consumed,
    Join,
    MemberDropped,
    Moved,
    OverBound,
    Refuse,
    Skipped,
    StuckAction,
)
from scheduler.policies.staleness_state import Buffer, BufferRow, Entries, GroupRow, LedgerSettings


class StaleFlow(StalenessRule[GroupRow]):
    """The reservations of all groups."""

    def __init__(self, settings: LedgerSettings) -> None:
        super().__init__(settings, settings.spare_members)
        self.max_age = None if settings.masks else settings.eta
        self._entries = Entries(settings)

    # Queries

    def buffers(self) -> list[BufferRow]:
        last = max(self.version + self.settings.eta, self._entries.last())
        return [
            self._entries.row(b, leased=self.leased and b == self.next_buffer)
            for b in range(self.next_buffer, last + 1)
        ]

    def entries(self, buffer: int) -> tuple[str, ...]:
        """Return the groups that occupy `buffer`, in order of entry; none once it is consumed."""
        return tuple(self._entries.at(buffer).occupied)

    def complete(self, buffer: int) -> bool:
        return self._entries.complete(buffer)

    def free_slots(self) -> int:
        return sum(self._entries.empty(b) for b in self._window())

    def stuck(self, action: StuckAction = "retry") -> tuple[str, ...]:
        first = self.next_buffer
        at = self._entries.at(first)
        full = not self.complete(first) and not self._entries.empty(first)
        few = self.settings.batch - len(at.occupied) <= self.settings.stuck_groups
        possible = full and few and (action == "retry" or at.occupied)
        return tuple(at.reserved) if possible else ()

    # Reserve

    def _start(self, event: Join) -> GroupRow | None:
        place = self._reservable(event)
        if place is None:
            return None
        version, buffer = place
        group = GroupRow(event.group_id, event.size, version, buffer)
        self._entries.reserve(group, buffer)
        return group

    def _reservable(self, event: Join) -> tuple[int, int] | None:
        """Return the `min_version` of a group that starts now, and the latest buffer of its window with an empty entry."""
        for version in range(self._admitting(event), self.version + 1):
            window = range(self._window().start, version + self.settings.eta + 1)
            buffer = next((b for b in reversed(window) if self._entries.empty(b)), None)
            if buffer is not None:
                return version, buffer
        return None

    def _admitting(self, event: Join) -> int:
        """Return the version of the engine that admits an episode, at least the oldest whose window is not over, and at most
        the newest."""
        if event.version is None:
            return self.version
        return min(max(event.version, self._window().start - self.settings.eta, 0), self.version)

    def version_of(self, event: Join) -> int:
        if (group := self._groups.get(event.group_id)) is not None:
            return max(group.version, self._admitting(event))
        place = self._reservable(event)
        return place[0] if place is not None else self.version

    # Occupy

    def _finish(self, group: GroupRow) -> list[Command]:
        if not group.settled(self._spare_members):
            return []
        commands: list[Command] = []
        for episode_id in group.running():
            group.members[episode_id] = "dropped"
            commands += [MemberDropped(episode_id, "surplus"), AbortEpisode(episode_id, "surplus")]
        if reason := group.worthless(self.settings):
            return commands + self._drop(group, reason)
        return commands + self._occupy(group)

    def _occupy(self, group: GroupRow) -> list[Command]:
        target, commands = self._place(group)
        own = group.buffer
        self._entries.leave(group)
        commands += self._entries.occupy(group, target)
        commands += self._entries.fill(own)
        return commands + self._no_room() if self.complete(target) else commands

    def _place(self, group: GroupRow) -> tuple[int, list[Command]]:
        """Return the earliest buffer that a settled group can get, and the commands for the groups that make room there."""
        first, own = max(group.version, self.next_buffer), group.buffer
        competing = self.complete(own)
        for buffer in range(first, own):
            if self._entries.empty(buffer):
                return buffer, []
            if not competing and not self.complete(buffer) and (other := self._entries.movable(buffer, own)):
                return buffer, [self._entries.move(other, own)]
        if not competing:
            return own, []
        # By the second and third invariants its window has such a buffer, and other groups hold all of its entries.
        buffer = next(b for b in self._window_of(group) if not self.complete(b))
        commands = self._give_up(self._entries.youngest(buffer), "surplus")
        if buffer > own:
            commands.append(self._entries.move(group, buffer))
        return buffer, commands

    # Give up

    def _drop(self, group: GroupRow, reason: str) -> list[Command]:
        return [*self._give_up(group, reason), *self._entries.fill(group.buffer)]

    def _give_up(self, group: GroupRow, reason: str, abort: bool = True) -> list[Command]:
        """End the group and free its entry, for the caller to fill."""
        self._entries.leave(group)
        return self._mark_dropped(group, reason, abort)

    def _no_room(self) -> list[Command]:
        """Apply StaleFlow's abort rule after a buffer has become complete, in ascending order of versions."""
        commands: list[Command] = []
        for group in self._entries.reserved():
            if all(self.complete(b) for b in self._window_of(group)):
                commands += self._late(group, "no_room")
        return commands

    def _late(self, group: GroupRow, reason: str) -> list[Command]:
        """Handle a reserved group without a buffer left in its window: its own is complete or was skipped."""
        place = self._place_beyond()
        if place is None:
            return self._give_up(group, reason, abort=self.settings.late_groups != "drop")
        return [self._entries.move(group, place)]

    def _place_beyond(self) -> int | None:
        if not self.settings.masks:
            return None
        return next((b for b in self._window() if self._entries.empty(b)), None)

    # Consume

    def _trained(self, buffer: int) -> list[Command]:
        group_ids = self.entries(buffer)
        competing = list(self._entries.at(buffer).reserved.values())
        self._skip_to(buffer + 1)
        for group_id in group_ids:
            self._forget(group_id)
        # By the third invariant no buffer of their windows has an empty entry for the groups that are still reserved here.
        surplus = [command for group in competing for command in self._give_up(group, "surplus")]
        return [Consumed(buffer, group_ids), *surplus, *self._published()]

    def _published(self) -> list[Command]:
        """Skip the buffers before `version`, unless the first of them waits for its `Consume`."""
        first = self.next_buffer
        if first >= self.version or (self.leased and self.complete(first)):
            return []
        commands: list[Command] = []
        lost: list[str] = []
        old = self._skip_to(self.version)
        for group in [group for at in old for group in at.occupied.values()]:
            if saved := self._save(group):
                commands += saved
            else:
                lost.append(group.group_id)
                self._forget(group.group_id)
        for group in [group for at in old for group in at.reserved.values()]:
            # By the third invariant no later buffer of its window has an empty entry.
            commands += self._late(group, "stale")
        return [*commands, Skipped(first, self.version, tuple(lost)), *self._no_room()]

    def _save(self, group: GroupRow) -> list[Command]:
        """Return a later place for a group that had occupied a skipped buffer; nothing if there is none."""
        place = self._place_beyond()
        if place is None:
            return []
        moved = OverBound if place > group.version + self.settings.eta else Moved
        return [moved(group.group_id, group.buffer, place), *self._entries.occupy(group, place)]

    def _skip_to(self, first: int) -> list[Buffer]:
        self.next_buffer, self.leased = first, False
        return self._entries.forget_before(first)

    def _window_of(self, group: GroupRow) -> range:
        """Return the buffers in which a reserved group may be trained."""
        newest = self._window().stop - 1
        last = newest if self.settings.late_groups == "overtake" else self._entries.end(group)
        return range(max(group.version, self.next_buffer), last + 1)

    def _window(self) -> range:
        return range(max(self.version, self.next_buffer), self.version + self.settings.eta + 1)

    # Unstick

    def _unstick(self, buffer: int, action: StuckAction) -> list[Command]:
        if buffer != self.next_buffer:
            raise ValueError(f"buffer {buffer} stuck: the next to train is {self.next_buffer}")
        stuck = [self._groups[group_id] for group_id in self.stuck(action)]
        if not stuck:
            return [Refuse("", "not_stuck")]
        reason = "retry" if action == "retry" else "truncated"
        # The entries stay free: no buffer is earlier.
        commands = [command for group in stuck for command in self._give_up(group, reason)]
        if action == "truncate":
            commands += [self._entries.truncate(buffer), *self._no_room()]
        return commands
