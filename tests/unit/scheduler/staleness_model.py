"""A model of the staleness ledger that believes nothing but its commands: what they add up to, and what each must satisfy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from scheduler.policies.staleness_events import (
    AbortEpisode,
    Admit,
    BufferReady,
    Command,
    Consume,
    Consumed,
    Event,
    Finish,
    Grading,
    GroupDropped,
    Late,
    MemberDropped,
    Moved,
    Occupied,
    Refuse,
    Skipped,
    Unstick,
)
from scheduler.policies.staleness_state import LedgerSettings


@dataclass
class Run:
    """A group as its commands tell of it."""

    size: int
    version: int
    reserved: int | None = None
    occupied: int | None = None
    late: bool = False
    closed: bool = False
    trained: bool = False
    running: set[str] = field(default_factory=set)
    grading: set[str] = field(default_factory=set)
    rewarded: dict[str, float | None] = field(default_factory=dict)
    joined: int = 0

    def underway(self) -> set[str]:
        return self.running | self.grading

    def equal(self) -> bool:
        values = list(self.rewarded.values())
        return len(values) > 1 and values[0] is not None and all(value == values[0] for value in values)


class Model:
    """Reference model: the state that the commands add up to."""

    def __init__(self, limits: LedgerSettings) -> None:
        self.limits = limits
        self.version = 0
        self.consumed = 0
        self.leased = False
        self.truncated: set[int] = set()
        self.ready: set[int] = set()
        self.groups: dict[str, Run] = {}
        self.fates: Counter[str] = Counter()
        self.admitted: set[str] = set()
        self.aborted: set[str] = set()

    # Queries

    def held(self, buffer: int) -> int:
        return sum(buffer in (run.reserved, run.occupied) for run in self.groups.values())

    def occupants(self, buffer: int) -> int:
        return sum(run.occupied == buffer for run in self.groups.values())

    def waiting(self, buffer: int) -> set[str]:
        return {group_id for group_id, run in self.groups.items() if run.reserved == buffer}

    def complete(self, buffer: int) -> bool:
        return buffer in self.truncated or self.occupants(buffer) == self.limits.batch

    def left(self, buffer: int) -> int:
        return self.limits.batch + self.limits.spare_groups - self.held(buffer)

    def empty(self, buffer: int) -> bool:
        return not self.complete(buffer) and self.left(buffer) > 0

    def open_buffers(self) -> list[int]:
        """Buffers open to a new group, in order."""
        window = range(max(self.version, self.consumed), self.version + self.limits.eta + 1)
        return [b for b in window if self.empty(b)]

    def window(self, run: Run) -> range:
        """Buffers in which a reserved group may be trained."""
        assert run.reserved is not None
        last = run.reserved if run.late else run.version + self.limits.eta
        return range(max(run.version, self.consumed), last + 1)

    def settled(self, run: Run) -> bool:
        whole = run.closed or run.joined == run.size + self.limits.spare_members
        return len(run.rewarded) == run.size or (whole and not run.underway())

    def stuck(self, action: str) -> set[str]:
        """Groups that an `Unstick` may give up."""
        first = self.consumed
        lacks = self.limits.batch - self.occupants(first)
        full = not self.complete(first) and self.left(first) == 0
        possible = full and lacks <= self.limits.stuck_groups and (action == "retry" or self.occupants(first))
        return self.waiting(first) if possible else set()

    # Commands

    def see(self, event: Event, commands: Sequence[Command]) -> None:
        """Takes in what one event led to."""
        self.event, self.commands = event, commands
        self.skipping = any(isinstance(command, Skipped) for command in commands)
        self.in_vain: set[str] = set()
        self.roomless = -1
        if isinstance(event, Unstick) and event.action == "truncate":
            self.truncated.add(event.buffer)
        for command in commands:
            self.see_one(command)
        assert not self.in_vain, "surplus that was not aborted"

    def see_one(self, command: Command) -> None:
        match command:
            case Admit(episode_id, group_id, buffer, version):
                self.see_admit(episode_id, self.groups[group_id], buffer, version)
            case Moved() | Late():
                self.see_moved(command, self.groups[command.group_id])
            case Occupied(group_id, buffer, entry):
                self.see_occupied(self.groups[group_id], buffer, entry)
            case GroupDropped(group_id, reason):
                self.see_group_dropped(self.groups[group_id], reason)
            case MemberDropped(episode_id, reason):
                self.see_member_dropped(episode_id, reason)
            case Grading(episode_id):
                assert self.event == Finish(episode_id)
                run = next(run for run in self.groups.values() if episode_id in run.running)
                run.running.remove(episode_id)
                run.grading.add(episode_id)
            case BufferReady(buffer):
                assert self.complete(buffer)
                assert buffer not in self.ready
                self.ready.add(buffer)
            case Consumed(buffer, group_ids):
                self.see_consumed(buffer, group_ids)
            case Skipped(first, until, group_ids):
                assert (first, until) == (self.consumed, self.version)
                lost = {g for g, run in self.groups.items() if run.occupied in range(first, until)}
                assert lost == set(group_ids)
                assert not any(run.reserved in range(first, until) for run in self.groups.values())
                self.consumed, self.leased = until, False
                self.forget(group_ids)
            case AbortEpisode(episode_id):
                self.in_vain.remove(episode_id)
                self.aborted.add(episode_id)
            case Refuse():
                pytest.fail("a refusal among other commands")

    def see_admit(self, episode_id: str, run: Run, buffer: int, version: int) -> None:
        if run.reserved is None:
            assert buffer == max(self.open_buffers()), "not the latest"
            assert version == self.version
            run.reserved, run.version = buffer, version
        assert (buffer, version) == (run.reserved, run.version)
        run.running.add(episode_id)
        run.joined += 1
        self.admitted.add(episode_id)

    def see_moved(self, moved: Moved | Late, run: Run) -> None:
        """A reservation, or with `mask` the place in a skipped buffer, goes to a later one."""
        source = run.reserved if run.occupied is None else run.occupied
        assert source == moved.from_buffer < moved.to_buffer
        assert not self.complete(moved.to_buffer)
        bound = run.version + self.limits.eta
        assert isinstance(moved, Late) == (moved.to_buffer > bound)
        if isinstance(moved, Late) or run.occupied is not None:
            assert self.limits.late == "mask"
            assert moved.to_buffer == min(self.open_buffers()), "not the earliest"
            passed = self.skipping and source < self.version
            assert passed or all(self.complete(b) for b in self.window(run))
            run.late = isinstance(moved, Late)
        run.reserved, run.occupied = moved.to_buffer, None

    def see_occupied(self, run: Run, buffer: int, entry: int) -> None:
        assert run.reserved is not None
        assert max(run.version, self.consumed) <= buffer <= run.reserved, "later than reserved"
        assert run.late or buffer <= run.version + self.limits.eta, "beyond the bound"
        assert entry == self.occupants(buffer) < self.limits.batch
        first = max(run.version, self.version if self.skipping else self.consumed)
        run.reserved = None
        assert not any(self.empty(b) for b in range(first, buffer)), "not the earliest"
        run.occupied, run.late = buffer, buffer > run.version + self.limits.eta
        assert not run.underway()
        assert min(self.limits.min_members, run.size) <= len(run.rewarded) <= run.size
        assert not (self.limits.drop_equal and run.equal())
        if not run.trained:
            self.fates.update(run.rewarded.keys())
        run.trained = True

    def see_group_dropped(self, run: Run, reason: str) -> None:
        assert run.reserved is not None
        self.see_reason(run, run.reserved, reason)
        run.reserved = None
        self.fates.update([*run.underway(), *run.rewarded])
        if self.limits.late != "drop" or reason not in ("stale", "no_room"):
            self.in_vain |= run.underway()
        run.running.clear()
        run.grading.clear()

    def see_reason(self, run: Run, reserved: int, reason: str) -> None:
        few = len(run.rewarded) < min(self.limits.min_members, run.size)
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
                assert self.limits.late != "mask" or not self.open_buffers()
            case "no_room":
                assert all(self.complete(b) for b in self.window(run))
                assert self.limits.late != "mask" or not self.open_buffers()
                assert run.version >= self.roomless, "versions in ascending order"
                self.roomless = run.version
            case "surplus":
                assert self.limits.spare_groups
                taken = any(isinstance(told, Occupied) and told.buffer == reserved for told in self.commands)
                assert self.event == Consume(reserved) or taken
            case "retry" | "truncated":
                action = "retry" if reason == "retry" else "truncate"
                assert self.event == Unstick(self.consumed, action)  # type: ignore[arg-type]
                assert reserved == self.consumed
            case _:
                pytest.fail(f"reason {reason}")

    def see_member_dropped(self, episode_id: str, reason: str) -> None:
        self.fates[episode_id] += 1
        if reason == "surplus":
            run = next(run for run in self.groups.values() if episode_id in run.underway())
            assert len(run.rewarded) == run.size
            run.running.discard(episode_id)
            run.grading.discard(episode_id)
            self.in_vain.add(episode_id)

    def see_consumed(self, buffer: int, group_ids: tuple[str, ...]) -> None:
        assert buffer == self.consumed
        assert len(group_ids) == self.limits.batch or buffer in self.truncated
        assert group_ids
        for run in (self.groups[g] for g in group_ids):
            assert run.occupied == buffer
            assert buffer >= run.version
            assert run.late == (buffer - run.version > self.limits.eta)
        self.consumed, self.leased = self.consumed + 1, False
        self.forget(group_ids)

    def forget(self, group_ids: tuple[str, ...]) -> None:
        for group_id in group_ids:
            del self.groups[group_id]
