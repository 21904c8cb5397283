"""Reference models of the staleness rules, computed from their commands alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import pytest

from scheduler.policies.staleness_events import (
    AbortEpisode,
    Admit,
    BatchReady,
    Command,
    Consume,
    Consumed,
    Event,
    Finish,
    Grading,
    GroupDropped,
    MemberDropped,
    Moved,
    Occupied,
    OverBound,
    Refuse,
    Skipped,
    Unstick,
)
from scheduler.policies.staleness_state import LedgerSettings


@dataclass
class Run:
    """A group as its commands describe it."""

    size: int
    version: int
    occupied: int | None = None
    over: bool = False
    closed: bool = False
    trained: bool = False
    running: set[str] = field(default_factory=set)
    grading: set[str] = field(default_factory=set)
    rewarded: dict[str, float | None] = field(default_factory=dict)
    joined: int = 0

    def pending(self) -> bool:
        return not self.over and self.occupied is None

    def underway(self) -> set[str]:
        return self.running | self.grading

    def settle(self, episode_id: str, rewarded: bool, value: float | None = None) -> None:
        self.running.discard(episode_id)
        self.grading.discard(episode_id)
        if rewarded:
            self.rewarded[episode_id] = value


@dataclass
class ReservedRun(Run):
    """A group of StaleFlow's ledger, and the batch that it holds."""

    reserved: int | None = None
    late: bool = False

    def equal(self) -> bool:
        values = list(self.rewarded.values())
        return len(values) > 1 and values[0] is not None and all(value == values[0] for value in values)


R = TypeVar("R", bound=Run)


class Model(ABC, Generic[R]):
    """Reference model: the state that the commands of any rule add up to, and the conditions on each command."""

    def __init__(self, limits: LedgerSettings) -> None:
        self.limits = limits
        self.version = 0
        self.next_batch = 0
        self.leased = False
        self.ready: set[int] = set()
        self.groups: dict[str, R] = {}
        self.fates: Counter[str] = Counter()
        self.admitted: set[str] = set()

    @abstractmethod
    def complete(self, batch: int) -> bool:
        """True if the batch gets no more groups."""

    def occupants(self, batch: int) -> int:
        return sum(run.occupied == batch for run in self.groups.values())

    def run_of(self, episode_id: str) -> R:
        return next(run for run in self.groups.values() if episode_id in run.underway())

    def underway(self) -> list[str]:
        """Episodes that run or are graded, of groups that are not over."""
        return sorted(e for run in self.groups.values() if run.pending() for e in run.underway())

    # Commands

    def see(self, event: Event, commands: Sequence[Command]) -> None:
        """Check the commands of one event, and apply them."""
        self.event, self.commands = event, commands
        self.skipping = any(isinstance(command, Skipped) for command in commands)
        self.in_vain: set[str] = set()
        for command in commands:
            self.see_one(command)
        assert not self.in_vain, "surplus that was not aborted"

    def see_one(self, command: Command) -> None:
        match command:
            case Admit(episode_id, group_id, batch, version):
                self.see_admit(episode_id, self.groups[group_id], batch, version)
            case Moved() | OverBound():
                self.see_moved(command, self.groups[command.group_id])
            case Occupied(group_id, batch, entry):
                self.see_occupied(group_id, self.groups[group_id], batch, entry)
            case GroupDropped(group_id, reason):
                self.see_group_dropped(self.groups[group_id], reason)
            case MemberDropped(episode_id, reason):
                self.fates[episode_id] += 1
                if reason == "surplus":
                    self.see_surplus(episode_id, self.run_of(episode_id))
            case Grading(episode_id):
                assert self.event == Finish(episode_id)
                run = self.run_of(episode_id)
                run.running.remove(episode_id)
                run.grading.add(episode_id)
            case BatchReady(batch):
                assert self.complete(batch)
                assert batch not in self.ready
                self.ready.add(batch)
            case Consumed(batch, group_ids):
                assert batch == self.next_batch
                assert self.complete(batch)
                self.see_trained(batch, group_ids)
                self.pass_over(batch + 1, group_ids)
            case Skipped(first, until, group_ids):
                assert (first, until) == (self.next_batch, self.version)
                assert first < until
                assert not (self.leased and self.complete(first))
                lost = {g for g, run in self.groups.items() if run.occupied in range(first, until)}
                assert lost == set(group_ids)
                self.see_skipped(range(first, until))
                self.pass_over(until, group_ids)
            case AbortEpisode(episode_id):
                self.in_vain.remove(episode_id)
            case Refuse():
                pytest.fail("a refusal among other commands")

    def see_admit(self, episode_id: str, run: R, batch: int, version: int) -> None:
        if run.joined == 0:
            assert version <= self.version
            self.see_start(run, batch)
        assert run.pending()
        assert version == run.version
        run.running.add(episode_id)
        run.joined += 1
        self.admitted.add(episode_id)

    @abstractmethod
    def see_start(self, run: R, batch: int) -> None:
        """A group starts, with `batch` as its batch."""

    def see_moved(self, moved: Moved | OverBound, run: R) -> None:
        pytest.fail(f"unexpected: {moved}")

    def see_surplus(self, episode_id: str, run: R) -> None:
        pytest.fail(f"unexpected surplus: {episode_id}")

    def see_occupied(self, group_id: str, run: R, batch: int, entry: int) -> None:
        assert run.pending()
        assert not run.underway()
        assert self.enough(run)
        assert len(run.rewarded) <= run.size
        assert entry == self.occupants(batch) < self.limits.batch
        self.see_place(group_id, run, batch)
        run.occupied = batch
        if not run.trained:
            self.fates.update(run.rewarded.keys())
        run.trained = True

    @abstractmethod
    def see_place(self, group_id: str, run: R, batch: int) -> None:
        """A group gets an entry of `batch`."""

    def see_group_dropped(self, run: R, reason: str) -> None:
        assert run.pending()
        self.see_reason(run, reason)
        run.over = True
        self.fates.update([*run.underway(), *run.rewarded])
        if self.aborts(reason):
            self.in_vain |= run.underway()
        run.running.clear()
        run.grading.clear()

    def aborts(self, reason: str) -> bool:
        """True if members that still run are aborted when their group is dropped for this reason."""
        return True

    @abstractmethod
    def see_reason(self, run: R, reason: str) -> None:
        """A group is dropped for this reason."""

    @abstractmethod
    def see_trained(self, batch: int, group_ids: tuple[str, ...]) -> None:
        """The batch was trained with these groups."""

    def see_skipped(self, batches: range) -> None:
        """Checks batches that are passed over."""

    def pass_over(self, first: int, group_ids: tuple[str, ...]) -> None:
        self.next_batch, self.leased = first, False
        for group_id in group_ids:
            del self.groups[group_id]

    def enough(self, run: R) -> bool:
        return len(run.rewarded) >= min(self.limits.min_members, run.size)


class LedgerModel(Model[ReservedRun]):
    """StaleFlow's ledger."""

    def __init__(self, limits: LedgerSettings) -> None:
        super().__init__(limits)
        self.truncated: set[int] = set()
        self.overtake = limits.late_groups == "overtake"

    # Queries

    def held(self, batch: int) -> int:
        return sum(batch in (run.reserved, run.occupied) for run in self.groups.values())

    def waiting(self, batch: int) -> set[str]:
        return {group_id for group_id, run in self.groups.items() if run.reserved == batch}

    def complete(self, batch: int) -> bool:
        return batch in self.truncated or self.occupants(batch) == self.limits.batch

    def left(self, batch: int) -> int:
        return self.limits.batch + self.limits.spare_groups - self.held(batch)

    def empty(self, batch: int) -> bool:
        return not self.complete(batch) and self.left(batch) > 0

    def open_batches(self, version: int | None = None) -> list[int]:
        """Batches open to a new group of this V, the newest version by default, in order."""
        last = (self.version if version is None else version) + self.limits.eta
        window = range(max(self.version, self.next_batch), last + 1)
        return [b for b in window if self.empty(b)]

    def window(self, run: ReservedRun) -> range:
        """Batches in which a reserved group may be trained."""
        assert run.reserved is not None
        last = run.reserved if run.late else run.version + self.limits.eta
        if self.overtake:
            last = self.version + self.limits.eta
        return range(max(run.version, self.next_batch), last + 1)

    def settled(self, run: ReservedRun) -> bool:
        whole = run.closed or run.joined == run.size + self.limits.spare_members
        return len(run.rewarded) == run.size or (whole and not run.underway())

    def stuck(self, action: str) -> set[str]:
        """Groups that an `Unstick` may give up."""
        first = self.next_batch
        lacks = self.limits.batch - self.occupants(first)
        full = not self.complete(first) and self.left(first) == 0
        possible = full and lacks <= self.limits.stuck_groups and (action == "retry" or self.occupants(first))
        return self.waiting(first) if possible else set()

    # Commands

    def see(self, event: Event, commands: Sequence[Command]) -> None:
        self.roomless = -1
        if isinstance(event, Unstick) and event.action == "truncate":
            self.truncated.add(event.batch)
        super().see(event, commands)

    def see_admit(self, episode_id: str, run: ReservedRun, batch: int, version: int) -> None:
        super().see_admit(episode_id, run, batch, version)
        assert batch == run.reserved

    def see_start(self, run: ReservedRun, batch: int) -> None:
        assert batch == max(self.open_batches(run.version)), "not the latest"
        run.reserved = batch

    def see_moved(self, moved: Moved | OverBound, run: ReservedRun) -> None:
        """A reservation, or with `mask` the place in a skipped batch, goes to a later one."""
        source = run.reserved if run.occupied is None else run.occupied
        assert source == moved.from_batch < moved.to_batch
        assert not self.complete(moved.to_batch)
        bound = run.version + self.limits.eta
        assert isinstance(moved, OverBound) == (moved.to_batch > bound)
        if self.overtake:
            assert moved.to_batch <= self.version + self.limits.eta
        elif isinstance(moved, OverBound) or run.occupied is not None:
            assert self.limits.late_groups == "mask"
            assert moved.to_batch == min(self.open_batches()), "not the earliest"
            passed = self.skipping and source < self.version
            assert passed or all(self.complete(b) for b in self.window(run))
        run.late = isinstance(moved, OverBound)
        run.reserved, run.occupied = moved.to_batch, None

    def see_place(self, group_id: str, run: ReservedRun, batch: int) -> None:
        assert run.reserved is not None
        assert max(run.version, self.next_batch) <= batch <= run.reserved, "later than reserved"
        assert run.late or batch <= run.version + self.limits.eta, "beyond the bound"
        assert not (self.limits.drop_equal and run.equal())
        first = max(run.version, self.version if self.skipping else self.next_batch)
        run.reserved = None
        assert not any(self.empty(b) for b in range(first, batch)), "not the earliest"
        if self.overtake and not self.skipping:
            assert all(self.complete(b) for b in range(first, batch)), "a batch waits for a group that runs"
        run.late = batch > run.version + self.limits.eta

    def see_group_dropped(self, run: ReservedRun, reason: str) -> None:
        super().see_group_dropped(run, reason)
        run.reserved = None

    def aborts(self, reason: str) -> bool:
        return self.limits.late_groups != "drop" or reason not in ("stale", "no_room")

    def see_reason(self, run: ReservedRun, reason: str) -> None:
        reserved, few = run.reserved, not self.enough(run)
        assert reserved is not None
        match reason:
            case "too_few_rewards":
                assert self.settled(run)
                assert few
            case "zero_variance":
                assert self.limits.drop_equal
                assert run.equal()
                assert self.settled(run)
                assert not few
            case "stale":
                assert self.skipping
                assert reserved < self.version
                assert not self.limits.masks or not self.open_batches()
            case "no_room":
                assert all(self.complete(b) for b in self.window(run))
                assert not self.limits.masks or not self.open_batches()
                assert run.version >= self.roomless, "versions in ascending order"
                self.roomless = run.version
            case "surplus":
                assert self.limits.spare_groups
                taken = any(
                    isinstance(command, Occupied) and command.batch == reserved for command in self.commands
                )
                assert self.event == Consume(reserved) or taken
            case "retry" | "truncated":
                action = "retry" if reason == "retry" else "truncate"
                assert self.event == Unstick(self.next_batch, action)  # type: ignore[arg-type]
                assert reserved == self.next_batch
            case _:
                pytest.fail(f"reason {reason}")

    def see_surplus(self, episode_id: str, run: ReservedRun) -> None:
        assert len(run.rewarded) == run.size
        run.running.discard(episode_id)
        run.grading.discard(episode_id)
        self.in_vain.add(episode_id)

    def see_trained(self, batch: int, group_ids: tuple[str, ...]) -> None:
        assert len(group_ids) == self.limits.batch or batch in self.truncated
        assert group_ids
        for run in (self.groups[g] for g in group_ids):
            assert run.occupied == batch
            assert batch >= run.version
            assert run.late == (batch - run.version > self.limits.eta)

    def see_skipped(self, batches: range) -> None:
        assert not any(run.reserved in batches for run in self.groups.values())


def staleness_bound(name: str, eta: int) -> int | None:
    return {"synchronous": 0, "one_step": 1, "roll": eta}.get(name)


def live_bound(name: str, eta: int, batch: int) -> int:
    """The bound in groups."""
    return {"synchronous": 1, "one_step": 2}.get(name, eta + 1) * batch


class QueueModel(Model[Run]):
    """A rule for comparison, by name: finished groups queue for the next batch."""

    def __init__(self, name: str, limits: LedgerSettings) -> None:
        super().__init__(limits)
        self.name = name
        self.entries: list[str] = []

    def complete(self, batch: int) -> bool:
        return batch == self.next_batch and len(self.entries) == self.limits.batch

    def live(self) -> int:
        """Groups that run or wait to be trained."""
        entered = 0 if self.version > self.next_batch else len(self.entries)
        return entered + sum(run.pending() for run in self.groups.values())

    def see_admit(self, episode_id: str, run: Run, batch: int, version: int) -> None:
        super().see_admit(episode_id, run, batch, version)
        assert self.live() <= live_bound(self.name, self.limits.eta, self.limits.batch)

    def see_start(self, run: Run, batch: int) -> None:
        assert batch >= max(self.version, self.next_batch)

    def see_place(self, group_id: str, run: Run, batch: int) -> None:
        assert batch == self.next_batch
        bound = staleness_bound(self.name, self.limits.eta)
        assert bound is None or 0 <= batch - run.version <= bound
        self.entries.append(group_id)

    def see_reason(self, run: Run, reason: str) -> None:
        match reason:
            case "too_few_rewards":
                assert not run.underway()
                assert not self.enough(run)
            case _:
                assert reason == "stale"
                bound = staleness_bound(self.name, self.limits.eta)
                # It was too old for every batch to come; Skipped comes after it.
                coming = max(self.version, self.next_batch + self.complete(self.next_batch))
                assert bound is not None
                assert coming - run.version > bound

    def see_trained(self, batch: int, group_ids: tuple[str, ...]) -> None:
        assert list(group_ids) == self.entries

    def pass_over(self, first: int, group_ids: tuple[str, ...]) -> None:
        assert list(group_ids) == self.entries
        super().pass_over(first, group_ids)
        self.entries = []
