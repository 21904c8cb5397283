"""Decides which group may start and which batch it is trained in: Reserve, Occupy, Consume of StaleFlow (arXiv 2601.12784).

Batch b trains version b to version b + 1. It has `batch` entries for groups, and `spare_groups`
more. It is *complete*, and gets no further group, once `batch` groups occupy it or it was truncated. A group's `min_version`
never changes, and the group may be trained only in its *window* of batches [min_version, min_version + eta]. The `min_version`
is the newest version when the group starts. If the engine that admits the group is older (`Join.version`), it is the engine's
version, or the next one whose window has an empty entry.

- **Reserve**: the first episode of a group reserves an empty entry of the *latest* possible batch of the window. If there is
  none, the group cannot start.
- **Occupy**: a settled group occupies an entry of the *earliest* possible batch of its window.
- **Consume**: the trainer consumes batch `next_batch` once it is complete, or gives it back (`Returned`).

Redundancy: the first `size` members of a group to be rewarded are trained, and the first `batch` groups to be settled; the others
are *surplus*, and surplus members are aborted. Groups that are still reserved in a complete batch compete for another batch of
their window: they get its next empty entry, or, once they are settled, the entry of its youngest group. They are given up when
their batch is consumed, or when every batch of their window is complete (*no room*).

Owns the state of all three. `apply` depends on the state and the event alone, so replaying the events in order under the same
settings restores the state. An event that raises ValueError or results in `Refuse` changes nothing and need not be kept.

Invariants, after every event:
- reserved plus occupied entries of a batch never exceed `batch + spare_groups`, and occupied ones `batch`. Nothing is reserved
  again in a complete batch;
- a reserved group's batch is not consumed and lies in its window (unless the group is late, see below), and its window has a
  batch that is neither consumed nor complete. Without spare groups that is its own, so only `Unstick`, `Skipped` or itself can
  end it;
- no reserved group has an empty entry in a later batch of its window: empty entries are as early as possible, where groups that
  finish first need them. `Moved` restores this whenever an entry is freed, and only moves groups to later batches;
- a group occupies a batch that is not later than the one that it holds reserved at that moment (the target of its last `Moved`
  or `OverBound`, else of its `Admit`), and in its window unless it is late. It keeps that entry unless its batch is skipped;
- `next_batch >= version`, unless batch `next_batch` is leased and complete: it has been trained and waits for its `Consume`.

On the last invariant: a version can be published although the batch before it was not trained (a first version above 0; a
trainer that went back to a checkpoint, since each version number is used only once). No group can start for such a batch any
more, and training would never reach it. `Skipped` skips it: its occupied groups are lost and its reserved ones are dropped.

A group is *late* when no batch of its window is left for it: they were skipped (`stale`) or are complete (`no_room`). With
`late_groups = "mask"` it gets the earliest empty entry beyond its window, up to the newest version's eta, if there is one. So
does a group that had occupied a skipped batch. `OverBound` reports this, and the tokens beyond the bound are masked. Otherwise
no group is ever trained beyond the bound: when a batch is consumed, all other groups are in later batches.

With `late_groups = "overtake"` the window of a reserved group ends where that of a new group does, so batches consist of groups
in the order in which they finish, and only tokens are bounded. The window grows with every version. The third invariant does not
hold then, and is not needed: without spare groups no group is reserved in a complete batch.
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
from scheduler.policies.staleness_state import Batch, BatchRow, Entries, GroupRow, LedgerSettings


class StaleFlow(StalenessRule[GroupRow]):
    """The reservations of all groups."""

    def __init__(self, settings: LedgerSettings) -> None:
        super().__init__(settings, settings.spare_members)
        self._entries = Entries(settings)

    # Queries

    def batches(self) -> list[BatchRow]:
        last = max(self.version + self.settings.eta, self._entries.last())
        return [
            self._entries.row(b, leased=self.leased and b == self.next_batch)
            for b in range(self.next_batch, last + 1)
        ]

    def entries(self, batch: int) -> tuple[str, ...]:
        """Return the groups that occupy `batch`, in order of entry; none once it is consumed."""
        return tuple(self._entries.at(batch).occupied)

    def complete(self, batch: int) -> bool:
        return self._entries.complete(batch)

    def free_slots(self) -> int:
        return sum(self._entries.empty(b) for b in self._window())

    def stuck(self, action: StuckAction = "retry") -> tuple[str, ...]:
        first = self.next_batch
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
        version, batch = place
        group = GroupRow(event.group_id, event.size, version, batch)
        self._entries.reserve(group, batch)
        return group

    def _reservable(self, event: Join) -> tuple[int, int] | None:
        """Return the `min_version` of a group that starts now, and the latest batch of its window with an empty entry."""
        for version in range(self._admitting(event), self.version + 1):
            window = range(self._window().start, version + self.settings.eta + 1)
            batch = next((b for b in reversed(window) if self._entries.empty(b)), None)
            if batch is not None:
                return version, batch
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
        own = group.batch
        self._entries.leave(group)
        commands += self._entries.occupy(group, target)
        commands += self._entries.fill(own)
        return commands + self._no_room() if self.complete(target) else commands

    def _place(self, group: GroupRow) -> tuple[int, list[Command]]:
        """Return the earliest batch that a settled group can get, and the commands for the groups that make room there."""
        first, own = max(group.version, self.next_batch), group.batch
        competing = self.complete(own)
        for batch in range(first, own):
            if self._entries.empty(batch):
                return batch, []
            if not competing and not self.complete(batch) and (other := self._entries.movable(batch, own)):
                return batch, [self._entries.move(other, own)]
        if not competing:
            return own, []
        # By the second and third invariants its window has such a batch, and other groups hold all of its entries.
        batch = next(b for b in self._window_of(group) if not self.complete(b))
        commands = self._give_up(self._entries.youngest(batch), "surplus")
        if batch > own:
            commands.append(self._entries.move(group, batch))
        return batch, commands

    # Give up

    def _drop(self, group: GroupRow, reason: str) -> list[Command]:
        return [*self._give_up(group, reason), *self._entries.fill(group.batch)]

    def _give_up(self, group: GroupRow, reason: str, abort: bool = True) -> list[Command]:
        """End the group and free its entry, for the caller to fill."""
        self._entries.leave(group)
        return self._mark_dropped(group, reason, abort)

    def _no_room(self) -> list[Command]:
        """Apply StaleFlow's abort rule after a batch has become complete, in ascending order of versions."""
        commands: list[Command] = []
        for group in self._entries.reserved():
            if all(self.complete(b) for b in self._window_of(group)):
                commands += self._late(group, "no_room")
        return commands

    def _late(self, group: GroupRow, reason: str) -> list[Command]:
        """Handle a reserved group without a batch left in its window: its own is complete or was skipped."""
        place = self._place_beyond()
        if place is None:
            return self._give_up(group, reason, abort=self.settings.late_groups != "drop")
        return [self._entries.move(group, place)]

    def _place_beyond(self) -> int | None:
        if not self.settings.masks:
            return None
        return next((b for b in self._window() if self._entries.empty(b)), None)

    # Consume

    def _trained(self, batch: int) -> list[Command]:
        group_ids = self.entries(batch)
        competing = list(self._entries.at(batch).reserved.values())
        self._skip_to(batch + 1)
        for group_id in group_ids:
            self._forget(group_id)
        # By the third invariant no batch of their windows has an empty entry for the groups that are still reserved here.
        surplus = [command for group in competing for command in self._give_up(group, "surplus")]
        return [Consumed(batch, group_ids), *surplus, *self._published()]

    def _published(self) -> list[Command]:
        """Skip the batches before `version`, unless the first of them waits for its `Consume`."""
        first = self.next_batch
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
            # By the third invariant no later batch of its window has an empty entry.
            commands += self._late(group, "stale")
        return [*commands, Skipped(first, self.version, tuple(lost)), *self._no_room()]

    def _save(self, group: GroupRow) -> list[Command]:
        """Return a later place for a group that had occupied a skipped batch; nothing if there is none."""
        place = self._place_beyond()
        if place is None:
            return []
        moved = OverBound if place > group.version + self.settings.eta else Moved
        return [moved(group.group_id, group.batch, place), *self._entries.occupy(group, place)]

    def _skip_to(self, first: int) -> list[Batch]:
        self.next_batch, self.leased = first, False
        return self._entries.forget_before(first)

    def _window_of(self, group: GroupRow) -> range:
        """Return the batches in which a reserved group may be trained."""
        newest = self._window().stop - 1
        last = newest if self.settings.late_groups == "overtake" else self._entries.end(group)
        return range(max(group.version, self.next_batch), last + 1)

    def _window(self) -> range:
        return range(max(self.version, self.next_batch), self.version + self.settings.eta + 1)

    # Unstick

    def _unstick(self, batch: int, action: StuckAction) -> list[Command]:
        if batch != self.next_batch:
            raise ValueError(f"batch {batch} stuck: the next to train is {self.next_batch}")
        stuck = [self._groups[group_id] for group_id in self.stuck(action)]
        if not stuck:
            return [Refuse("", "not_stuck")]
        reason = "retry" if action == "retry" else "truncated"
        # The entries stay free: no batch is earlier.
        commands = [command for group in stuck for command in self._give_up(group, reason)]
        if action == "truncate":
            commands += [self._entries.truncate(batch), *self._no_room()]
        return commands
