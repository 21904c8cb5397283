"""The shared part of the competing rules: finished groups wait in a queue, and batches are made from its head.

A rule adds its decisions: how many groups may start now (`quota`), in which order finished groups are trained and from when on
(`rank`, `may_enter`), and from which age on a group is given up (`max_age`).

Owns the whole state; what a rule keeps beyond that is in its `to_json`. As in `staleness.Ledger`, `apply` depends on the state
and the event alone, and an event that raises ValueError or is answered by `Refuse` changes nothing.

A group has the version that was the newest when it started. It runs until all its members are settled. With enough rewards it
is *finished*, and *enters* batch `consumed`, at once or later; else it is dropped. It is *live* until its batch was trained.

Invariants, after every event:
- only batch `consumed` has entries. They are `Occupied` in their order and only grow, and it is complete with `settings.batch`;
- `Occupied` or `GroupDropped` is told once of every group, and of a group that entered nothing more but `Consumed` or
  `Skipped`;
- a group that may enter and finds room has entered;
- `consumed >= version`, unless batch `consumed` is leased and complete: then it was trained and waits for its `Consume`.
  Otherwise a `Publish` that leaves the batch behind loses its entries (`Skipped`); groups that did not enter yet stay, if they
  are not too old;
- where `max_age` is a number, no group enters batch b whose version is less than b - `max_age`.

Nobody knows in advance in which batch a group will be. `Admit.buffer` is the one it will be in if groups finish in the order in
which they start and none is dropped. `Occupied` tells the one it is in.

Memory: as in `staleness.Ledger`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, assert_never

from scheduler.policies.staleness import DROPPED_KEPT, BufferRow, GroupRow, LedgerSettings
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
    Grading,
    GroupDropped,
    Join,
    Leased,
    Occupied,
    Publish,
    Refuse,
    Reward,
    Skipped,
    Unstick,
)


@dataclass(slots=True)
class QueuedGroup(GroupRow):
    """A group, and how many started before it."""

    number: int = 0


class GroupQueue(ABC):
    """A rule. `version`: the newest published; `consumed`: the next batch to train."""

    max_age: int | None = None
    """How many versions a group may be older than the version trained on it; None: any number."""

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.version = 0
        self.consumed = 0
        self.leased = False
        self._groups: dict[str, QueuedGroup] = {}
        self._group_of: dict[str, str] = {}
        self._started = 0
        self._entries: list[str] = []
        self._finished: list[QueuedGroup] = []
        self._running: dict[int, int] = {}
        self._dropped: list[str] = []

    # The rule's decisions

    @abstractmethod
    def quota(self) -> int:
        """How many groups may start now; less than 0 is none."""

    def rank(self, group: QueuedGroup) -> int:
        """The lowest enters first; among equals, the one that finished first."""
        return 0

    def may_enter(self, group: QueuedGroup) -> bool:
        """True if `group`, the first of the finished ones, may enter a batch that has room."""
        return True

    def on_settled(self, finished: bool) -> list[Command]:
        """The commands that follow when a group is finished (before it enters) or dropped for too few rewards."""
        return []

    # Inputs of the decisions

    @property
    def batch(self) -> int:
        """Groups in one batch."""
        return self.settings.batch

    @property
    def running(self) -> int:
        """Groups that run."""
        return sum(self._running.values())

    @property
    def untrained(self) -> int:
        """Finished groups that were not trained, in batch `consumed` or not yet in a batch."""
        entered = 0 if self.version > self.consumed else len(self._entries)
        return entered + len(self._finished)

    @property
    def live(self) -> int:
        """Groups that run, or wait to be trained."""
        return self.running + self.untrained

    @property
    def next_batch(self) -> int:
        """The first batch that was not trained."""
        return max(self.version, self.consumed)

    def budget(self, batches: int) -> int:
        """How many groups may start, so that live ones would be trained up to `batches` batches after the newest version."""
        return (self.version + batches - self.next_batch) * self.batch - self.live

    def oldest_running(self) -> int:
        """The least version of a group that runs; if none does, the newest version."""
        return min(self._running, default=self.version)

    def running_groups(self) -> list[QueuedGroup]:
        """The groups that run, in order of start."""
        waiting = {group.group_id for group in self._finished}
        return [g for g in self._groups.values() if g.state == "reserved" and g.group_id not in waiting]

    def give_up(self, groups: list[QueuedGroup], reason: str) -> list[Command]:
        """Drops groups that run or are finished, but did not enter."""
        waiting = {group.group_id for group in self._finished}
        commands: list[Command] = []
        for group in groups:
            if group.group_id not in waiting:
                self._stop(group)
            commands += self._drop(group, reason)
        self._finished = [group for group in self._finished if group.state == "reserved"]
        return commands

    # The interface (`base.StalenessRule`)

    def apply(self, event: Event) -> list[Command]:
        """Changes the state by `event`. Raises ValueError, and changes nothing, if the event is impossible."""
        match event:
            case Join():
                return self._join(event)
            case Finish() | Reward() | Drop():
                return self._settle(event)
            case CloseGroup(group_id):
                return self._close(group_id)
            case Leased(buffer):
                return self._lease(buffer)
            case Consume(buffer):
                return self._consume(buffer)
            case Publish(version):
                return self._publish(version)
            case Unstick():
                raise ValueError("only the rule `staleflow` gives up groups of a batch that is stuck")
            case _:
                assert_never(event)

    def to_json(self) -> dict[str, Any]:
        """The whole state and the settings."""
        return {
            "settings": asdict(self.settings),
            "version": self.version,
            "consumed": self.consumed,
            "leased": self.leased,
            "started": self._started,
            "entries": list(self._entries),
            "finished": [group.group_id for group in self._finished],
            "groups": [asdict(group) for group in self._groups.values()],
            "dropped": list(self._dropped),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        rule = cls(LedgerSettings(**value["settings"]))
        rule.version, rule.consumed, rule.leased = value["version"], value["consumed"], value["leased"]
        rule._started, rule._entries = value["started"], list(value["entries"])
        rule._groups = {group["group_id"]: QueuedGroup(**group) for group in value["groups"]}
        rule._finished = [rule._groups[group_id] for group_id in value["finished"]]
        rule._dropped = list(value["dropped"])
        rule._group_of = {e: g.group_id for g in rule._groups.values() for e in g.members}
        for group in rule.running_groups():
            rule._running[group.version] = rule._running.get(group.version, 0) + 1
        return rule

    def buffers(self) -> list[BufferRow]:
        """Every batch that is not consumed and can hold something, in order.

        Groups that did not enter are shown as reserved, as if they were to enter in turn.
        """
        entered, waiting = len(self._entries), self.running + len(self._finished)
        room = waiting + self.free_slots()
        rows: list[BufferRow] = []
        buffer = self.consumed
        while not rows or room > 0:
            reserved = min(self.batch - entered, waiting)
            rows.append(self._row(buffer, entered, reserved))
            room, waiting = room - (self.batch - entered), waiting - reserved
            buffer, entered = max(buffer + 1, self.version), 0
        return rows

    def groups(self) -> list[GroupRow]:
        """Every group that is not forgotten, in order of start. To be read only."""
        return list(self._groups.values())

    def entries(self, buffer: int) -> tuple[str, ...]:
        """The groups in batch `consumed`, in order of entry; no other batch has any."""
        return tuple(self._entries) if buffer == self.consumed else ()

    def complete(self, buffer: int) -> bool:
        """True if the batch gets no more groups and can be trained."""
        return buffer == self.consumed and len(self._entries) == self.batch

    def free_slots(self) -> int:
        """How many new groups could start now."""
        return max(self.quota(), 0)

    # Start

    def _join(self, event: Join) -> list[Command]:
        if event.size < 1:
            raise ValueError(f"a group of {event.size} members: {event.group_id}")
        if event.episode_id in self._group_of:
            raise ValueError(f"episode {event.episode_id} has joined before")
        group = self._groups.get(event.group_id)
        if group is None:
            if self.free_slots() == 0:
                return [Refuse(event.episode_id, "no_slot")]
            group = self._start(event)
        elif reason := group.join_refusal(event.size):
            return [Refuse(event.episode_id, reason)]
        group.members[event.episode_id] = "open"
        self._group_of[event.episode_id] = event.group_id
        return [Admit(event.episode_id, event.group_id, group.buffer, group.version)]

    def _start(self, event: Join) -> QueuedGroup:
        buffer = self.next_batch + self.live // self.batch
        group = QueuedGroup(event.group_id, event.size, self.version, buffer, number=self._started)
        self._groups[event.group_id] = group
        self._started += 1
        self._running[self.version] = self._running.get(self.version, 0) + 1
        return group

    # Finish

    def _settle(self, event: Finish | Reward | Drop) -> list[Command]:
        if event.episode_id not in self._group_of:
            raise ValueError(f"no episode {event.episode_id}")
        group = self._groups[self._group_of[event.episode_id]]
        told = group.take(event)
        over = not any(isinstance(command, Refuse | Grading) for command in told)
        return told + self._finish(group) if over else told

    def _close(self, group_id: str) -> list[Command]:
        if group_id not in self._groups:
            raise ValueError(f"no group {group_id}")
        group = self._groups[group_id]
        if group.state != "reserved":
            return []
        if group.settled():
            return [Refuse("", "group_finished")]
        group.closed = True
        return self._finish(group)

    def _finish(self, group: QueuedGroup) -> list[Command]:
        if not group.settled():
            return []
        self._stop(group)
        finished = group.rewarded() >= min(self.settings.min_members, group.size)
        if finished:
            insort(self._finished, group, key=self.rank)
        fate = [] if finished else self._drop(group, "too_few_rewards")
        return [*fate, *self.on_settled(finished), *self._fill()]

    def _stop(self, group: QueuedGroup) -> None:
        self._running[group.version] -= 1
        if self._running[group.version] == 0:
            del self._running[group.version]

    def _fill(self) -> list[Command]:
        """Lets groups enter batch `consumed` while it has room."""
        if self.complete(self.consumed):
            return []
        commands: list[Command] = []
        while len(self._entries) < self.batch and self._finished and self.may_enter(self._finished[0]):
            group = self._finished.pop(0)
            group.buffer, group.state = self.consumed, "occupied"
            commands.append(Occupied(group.group_id, self.consumed, len(self._entries)))
            self._entries.append(group.group_id)
        if self.complete(self.consumed):
            commands.append(BufferReady(self.consumed))
        return commands

    def _drop(self, group: QueuedGroup, reason: str) -> list[Command]:
        group.state = "dropped"
        self._dropped.append(group.group_id)
        if len(self._dropped) > DROPPED_KEPT:
            self._forget(self._dropped.pop(0))
        return [GroupDropped(group.group_id, reason), *(AbortEpisode(e, reason) for e in group.running())]

    # Train

    def _lease(self, buffer: int) -> list[Command]:
        if buffer != self.consumed:
            raise ValueError(f"lease of buffer {buffer}: the next to train is {self.consumed}")
        self.leased = True
        return []

    def _consume(self, buffer: int) -> list[Command]:
        if buffer != self.consumed:
            raise ValueError(f"buffer {buffer} trained: the next to train is {self.consumed}")
        if not self.complete(buffer):
            raise ValueError(f"buffer {buffer} trained: it is not complete")
        consumed = Consumed(buffer, self.entries(buffer))
        self._pass(buffer + 1)
        return [consumed, *self._advance()]

    def _publish(self, version: int) -> list[Command]:
        if version <= self.version:
            raise ValueError(f"version {version} published after version {self.version}")
        self.version = version
        return self._advance()

    def _advance(self) -> list[Command]:
        """After a batch or a version: what that skips, what that makes too old, and what may enter now."""
        commands: list[Command] = []
        trained = self.leased and self.complete(self.consumed)
        if self.version > self.consumed and not trained:
            commands.append(Skipped(self.consumed, self.version, self.entries(self.consumed)))
            self._pass(self.version)
        return [*self._expire(), *commands, *self._fill()]

    def _expire(self) -> list[Command]:
        if self.max_age is None:
            return []
        oldest = self.next_batch - self.max_age
        old = [g for g in self._groups.values() if g.state == "reserved" and g.version < oldest]
        return self.give_up(old, "stale")

    def _pass(self, first: int) -> None:
        for group_id in self._entries:
            self._forget(group_id)
        self.consumed, self.leased, self._entries = first, False, []

    def _forget(self, group_id: str) -> None:
        for episode_id in self._groups.pop(group_id).members:
            del self._group_of[episode_id]

    def _row(self, buffer: int, entered: int, reserved: int) -> BufferRow:
        full: Literal["READY", "STUCK"] = "READY" if entered == self.batch else "STUCK"
        return BufferRow(
            buffer,
            full if entered + reserved == self.batch else "PENDING",
            entered,
            reserved,
            self.leased and buffer == self.consumed,
        )
