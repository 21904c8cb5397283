"""What a staleness rule does for its groups, whatever decides about their batches: `staleflow.py` does.

A rule receives events and returns commands (`staleness_events.py`); it does nothing else. The commands depend only on the
settings and the events so far. Batches are numbered from 0; batch b makes version b + 1 out of version b, and is trained once,
in order.

Memory: a group that was trained is forgotten with its batch, a dropped one when `DROPPED_KEPT` newer ones were dropped. After
that a `Join` with its id starts a new group and its episodes are unknown. An episode of a dropped group may join another group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar, assert_never

from scheduler.policies.staleness_events import (
    AbortEpisode,
    Admit,
    CloseGroup,
    Command,
    Consume,
    Drop,
    Event,
    Finish,
    Grading,
    GroupDropped,
    Join,
    Leased,
    Publish,
    Refuse,
    Returned,
    Reward,
    StuckAction,
    Unstick,
)
from scheduler.policies.staleness_state import BatchRow, GroupRow, LedgerSettings

G = TypeVar("G", bound=GroupRow)
DROPPED_KEPT = 1024


class StalenessRule(ABC, Generic[G]):
    """The groups of one model, and the rule that decides about them.

    `version` is the newest published version, `next_batch` the next batch to train, `leased` whether a trainer has it.
    """

    def __init__(self, settings: LedgerSettings, spare_members: int = 0) -> None:
        self.settings = settings
        self.version = 0
        self.next_batch = 0
        self.leased = False
        self._spare_members = spare_members
        self._groups: dict[str, G] = {}
        self._group_of: dict[str, str] = {}
        self._dropped: list[str] = []

    def apply(self, event: Event) -> list[Command]:
        """Change the state by `event`. Raise ValueError, and change nothing, if the event is impossible.

        A result of [Refuse(...)] alone means that nothing changed, so the event need not be stored.
        """
        match event:
            case Join():
                return self._join(event)
            case Finish() | Reward() | Drop():
                return self._settle(event)
            case CloseGroup(group_id):
                return self._close(group_id)
            case Leased(batch):
                return self._lease(batch)
            case Returned(batch):
                return self._return(batch)
            case Consume(batch):
                return self._consume(batch)
            case Publish(version):
                return self._publish(version)
            case Unstick(batch, action):
                return self._unstick(batch, action)
            case _:
                assert_never(event)

    # Queries

    def groups(self) -> list[GroupRow]:
        """Return every group that is not forgotten, in order of start. Read only."""
        return list(self._groups.values())

    @abstractmethod
    def entries(self, batch: int) -> tuple[str, ...]:
        """Return the known groups of a batch, in order. Those of batch `next_batch` only grow, until it is `complete`."""

    @abstractmethod
    def complete(self, batch: int) -> bool:
        """Return true if the batch gets no more groups and can be trained."""

    @abstractmethod
    def batches(self) -> list[BatchRow]:
        """Return every batch that is not consumed and can have groups, in order."""

    @abstractmethod
    def free_slots(self) -> int:
        """Return how many new groups could start now."""

    def stuck(self, action: StuckAction = "retry") -> tuple[str, ...]:
        """Return the groups that `Unstick` would give up now; none if it would be refused."""
        return ()

    def version_of(self, event: Join) -> int:
        """Return the `min_version` of an episode if it joined now and was admitted. It is never below its group's."""
        return self.version

    # A rule's decisions

    @abstractmethod
    def _start(self, event: Join) -> G | None:
        """Return the group that begins with this episode, or None if no group may start."""

    @abstractmethod
    def _finish(self, group: G) -> list[Command]:
        """Return the commands for a group one of whose members has settled, or that was closed."""

    @abstractmethod
    def _trained(self, batch: int) -> list[Command]:
        """Return the commands when batch `next_batch` was trained."""

    @abstractmethod
    def _published(self) -> list[Command]:
        """Return the commands for batches that lie before `version`, which is new, or whose first was given back."""

    def _unstick(self, batch: int, action: StuckAction) -> list[Command]:
        raise ValueError("only the rule `staleflow` gives up groups of a batch that is stuck")

    # Groups

    def _join(self, event: Join) -> list[Command]:
        if event.size < 1:
            raise ValueError(f"a group of {event.size} members: {event.group_id}")
        known = self._group_of.get(event.episode_id)
        if known is not None and self._groups[known].state != "dropped":
            raise ValueError(f"episode {event.episode_id} has joined before")
        group = self._groups.get(event.group_id)
        if group is None:
            group = self._start(event)
            if group is None:
                return [Refuse(event.episode_id, "no_slot")]
            self._groups[event.group_id] = group
        elif reason := group.join_refusal(event.size, self._spare_members):
            return [Refuse(event.episode_id, reason)]
        group.members[event.episode_id] = "open"
        self._group_of[event.episode_id] = event.group_id
        return [Admit(event.episode_id, event.group_id, group.batch, group.version)]

    def _settle(self, event: Finish | Reward | Drop) -> list[Command]:
        if event.episode_id not in self._group_of:
            raise ValueError(f"no episode {event.episode_id}")
        group = self._groups[self._group_of[event.episode_id]]
        commands = group.apply(event)
        over = not any(isinstance(command, Refuse | Grading) for command in commands)
        return commands + self._finish(group) if over else commands

    def _close(self, group_id: str) -> list[Command]:
        if group_id not in self._groups:
            raise ValueError(f"no group {group_id}")
        group = self._groups[group_id]
        if group.state != "reserved":
            return []
        if group.settled(self._spare_members):
            return [Refuse("", "group_finished")]
        group.closed = True
        return self._finish(group)

    def _mark_dropped(self, group: G, reason: str, abort: bool = True) -> list[Command]:
        group.state = "dropped"
        self._dropped.append(group.group_id)
        if len(self._dropped) > DROPPED_KEPT:
            self._forget(self._dropped.pop(0))
        running = group.running() if abort else []
        return [GroupDropped(group.group_id, reason), *(AbortEpisode(e, reason) for e in running)]

    def _forget(self, group_id: str) -> None:
        for episode_id in self._groups.pop(group_id).members:
            if (
                self._group_of[episode_id] == group_id
            ):  # an episode of a dropped group may have joined another
                del self._group_of[episode_id]

    # Batches

    def _lease(self, batch: int) -> list[Command]:
        if batch != self.next_batch:
            raise ValueError(f"lease of batch {batch}: the next to train is {self.next_batch}")
        self.leased = True
        return []

    def _return(self, batch: int) -> list[Command]:
        if batch != self.next_batch:
            raise ValueError(f"batch {batch} given back: the next to train is {self.next_batch}")
        self.leased = False
        return self._published()

    def _consume(self, batch: int) -> list[Command]:
        if batch != self.next_batch:
            raise ValueError(f"batch {batch} trained: the next to train is {self.next_batch}")
        if not self.complete(batch):
            raise ValueError(f"batch {batch} trained: it is not complete")
        return self._trained(batch)

    def _publish(self, version: int) -> list[Command]:
        if version <= self.version:
            raise ValueError(f"version {version} published after version {self.version}")
        self.version = version
        return self._published()
