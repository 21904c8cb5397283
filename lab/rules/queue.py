"""The shared part of the competing rules: finished groups wait in a queue, and batches are made from its head.

A rule adds its decisions: how many groups may start now (`quota`), in which order finished groups are trained and from when on
(`rank`, `may_enter`), and from which age on a group is given up (`max_age`).

A group has the version that was the newest when it started. It runs until all its members are settled. If it can teach anything
(`GroupRow.worthless`) it is *finished*, and *enters* batch `next_batch`, immediately or later; else it is dropped. It is *live*
until its batch was trained.

Invariants, after every event:
- only batch `next_batch` has entries. They only grow, are `Occupied` in their order, and are complete at `settings.batch`;
- each group has one `Occupied` or `GroupDropped`, and a group that entered has only `Consumed` or `Skipped` after it;
- a group that may enter and finds room has entered;
- `next_batch >= version`, unless batch `next_batch` is leased and complete: then it was trained and waits for its `Consume`.
  Otherwise a `Publish` that leaves the batch behind loses its entries (`Skipped`); groups that did not enter yet stay, if they
  are not too old;
- where `max_age` is a number, no group enters batch b whose version is less than b - `max_age`.

The batch of a group is not known in advance. `Admit.batch` is the one it will be in if groups finish in the order in
which they start and none is dropped. `Occupied` names the one it is in.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import insort
from dataclasses import dataclass
from typing import Literal

from scheduler.policies.staleness_base import StalenessRule
from scheduler.policies.staleness_events import BatchReady, Command, Consumed, Join, Occupied, Skipped
from scheduler.policies.staleness_state import BatchRow, GroupRow, LedgerSettings


@dataclass(slots=True)
class QueuedGroup(GroupRow):
    """A group, and how many started before it."""

    number: int = 0


class GroupQueue(StalenessRule[QueuedGroup]):
    """A rule whose finished groups wait in a queue."""

    def __init__(self, settings: LedgerSettings) -> None:
        super().__init__(settings)
        self._started = 0
        self._entries: list[str] = []
        self._finished: list[QueuedGroup] = []
        self._running: dict[int, int] = {}

    # The rule's decisions

    @abstractmethod
    def quota(self) -> int:
        """Return how many groups may start now; a negative number means none."""

    def rank(self, group: QueuedGroup) -> int:
        """Return the group's rank: the lowest enters first; among equals, the one that finished first."""
        return 0

    def may_enter(self, group: QueuedGroup) -> bool:
        """Return true if `group`, the first of the finished ones, may enter a batch that has room."""
        return True

    # Inputs of the decisions

    @property
    def batch(self) -> int:
        """Groups in one batch."""
        return self.settings.batch

    @property
    def next_buffer(self) -> int:
        """Return `next_batch`, under the name by which the simulator's frozen baselines read it."""
        return self.next_batch

    @property
    def running(self) -> int:
        """Groups that run."""
        return sum(self._running.values())

    @property
    def untrained(self) -> int:
        """Finished groups that were not trained, in batch `next_batch` or not yet in a batch."""
        entered = 0 if self.version > self.next_batch else len(self._entries)
        return entered + len(self._finished)

    @property
    def live(self) -> int:
        """Groups that run, or wait to be trained."""
        return self.running + self.untrained

    @property
    def first_untrained(self) -> int:
        """The first batch that was not trained."""
        return max(self.version, self.next_batch)

    def budget(self, batches: int) -> int:
        """Return how many groups may start so that live ones are trained at most `batches` batches after the newest version."""
        return (self.version + batches - self.first_untrained) * self.batch - self.live

    def oldest_running(self) -> int:
        """Return the least version of a group that runs; if none does, the newest version."""
        return min(self._running, default=self.version)

    def give_up(self, groups: list[QueuedGroup], reason: str) -> list[Command]:
        """Drop groups that run or are finished, but did not enter."""
        waiting = {group.group_id for group in self._finished}
        commands: list[Command] = []
        for group in groups:
            if group.group_id not in waiting:
                self._stop(group)
            commands += self._mark_dropped(group, reason)
        self._finished = [group for group in self._finished if group.state == "reserved"]
        return commands

    # Queries

    def batches(self) -> list[BatchRow]:
        """Return every batch that is not consumed and can hold a group, in order.

        Groups that did not enter are shown as reserved, as if they were to enter in turn.
        """
        entered, waiting = len(self._entries), self.running + len(self._finished)
        room = waiting + self.free_slots()
        rows: list[BatchRow] = []
        batch = self.next_batch
        while not rows or room > 0:
            reserved = min(self.batch - entered, waiting)
            rows.append(self._row(batch, entered, reserved))
            room, waiting = room - (self.batch - entered), waiting - reserved
            batch, entered = max(batch + 1, self.version), 0
        return rows

    def entries(self, batch: int) -> tuple[str, ...]:
        """Return the groups in batch `next_batch`, in order of entry; no other batch has any."""
        return tuple(self._entries) if batch == self.next_batch else ()

    def complete(self, batch: int) -> bool:
        """Return true if the batch gets no more groups and can be trained."""
        return batch == self.next_batch and len(self._entries) == self.batch

    def free_slots(self) -> int:
        """Return how many new groups could start now."""
        return max(self.quota(), 0)

    # Start

    def _start(self, event: Join) -> QueuedGroup | None:
        if self.free_slots() == 0:
            return None
        batch = self.first_untrained + self.live // self.batch
        group = QueuedGroup(event.group_id, event.size, self.version, batch, number=self._started)
        self._started += 1
        self._running[self.version] = self._running.get(self.version, 0) + 1
        return group

    # Finish

    def _finish(self, group: QueuedGroup) -> list[Command]:
        if not group.settled():
            return []
        self._stop(group)
        reason = group.worthless(self.settings)
        if reason is None:
            insort(self._finished, group, key=self.rank)
        fate = self._mark_dropped(group, reason) if reason else []
        return [*fate, *self._fill()]

    def _stop(self, group: QueuedGroup) -> None:
        self._running[group.version] -= 1
        if self._running[group.version] == 0:
            del self._running[group.version]

    def _fill(self) -> list[Command]:
        """Let groups enter batch `next_batch` while it has room."""
        if self.complete(self.next_batch):
            return []
        commands: list[Command] = []
        while len(self._entries) < self.batch and self._finished and self.may_enter(self._finished[0]):
            group = self._finished.pop(0)
            group.batch, group.state = self.next_batch, "occupied"
            commands.append(Occupied(group.group_id, self.next_batch, len(self._entries)))
            self._entries.append(group.group_id)
        if self.complete(self.next_batch):
            commands.append(BatchReady(self.next_batch))
        return commands

    # Train

    def _trained(self, batch: int) -> list[Command]:
        consumed = Consumed(batch, self.entries(batch))
        self._pass(batch + 1)
        return [consumed, *self._published()]

    def _published(self) -> list[Command]:
        """Skip, expire and fill after a batch or a version."""
        commands: list[Command] = []
        trained = self.leased and self.complete(self.next_batch)
        if self.version > self.next_batch and not trained:
            commands.append(Skipped(self.next_batch, self.version, self.entries(self.next_batch)))
            self._pass(self.version)
        return [*self._expire(), *commands, *self._fill()]

    def _expire(self) -> list[Command]:
        if self.max_age is None:
            return []
        oldest = self.first_untrained - self.max_age
        old = [g for g in self._groups.values() if g.state == "reserved" and g.version < oldest]
        return self.give_up(old, "stale")

    def _pass(self, first: int) -> None:
        for group_id in self._entries:
            self._forget(group_id)
        self.next_batch, self.leased, self._entries = first, False, []

    def _row(self, batch: int, entered: int, reserved: int) -> BatchRow:
        full: Literal["READY", "STUCK"] = "READY" if entered == self.batch else "STUCK"
        return BatchRow(
            batch,
            full if entered + reserved == self.batch else "PENDING",
            entered,
            reserved,
            self.leased and batch == self.next_batch,
        )
