"""Where followers place calls: by versions, and next to the calls of every other process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from gateway.cluster.follower_placement import FollowerPlacement
from gateway.control.coordinator_placement import ControlPlacement
from scheduler.program.placement import Placement
from scheduler.reactor import Context
from tests.faults.virtual.links import LinkMachine
from tests.faults.virtual.processes import Process


async def _nothing(_placement: ControlPlacement) -> None:
    """Stands for `ControlPlacement.read_loads`."""


_pull = Placement._pull


def _pull_once(reactor: Placement, now: Context) -> bool:
    """Stands for `Placement._pull`: an engine pulls when a version is there, and none later."""
    return now.present(reactor.target) and _pull(reactor, now)


@contextmanager
def versions_side_by_side(*, tables: bool) -> Iterator[LinkMachine]:
    """Two engines under `pull`, at versions 1 and 0: no program lets the second follow. An episode is older.

    `tables`: followers get tables, and do not choose by what they know alone.
    """
    machine = LinkMachine()
    first_alone = patch.object(Placement, "_pull", _pull_once)
    try:
        with first_alone if tables else patch.object(ControlPlacement, "read_loads", _nothing):
            machine.begin("abort", "pull", 2, accounts=True)
            assert machine.c.open_episode() is not None
            machine.publish()
            machine.advance(5.0)
            assert sorted(slot.version for slot in machine.alive()[1].pool.slots.values()) == [0, 1]
            assert isinstance(machine.alive()[1].pool._placer, FollowerPlacement) == tables
            yield machine
    finally:
        machine.teardown()


@pytest.mark.parametrize("tables", [False, True])
def test_a_follower_lets_no_engine_sample_a_call_of_a_newer_group(tables: bool) -> None:
    """Check that the call's min_version excludes the older engine, although the newer one has more to do."""
    with versions_side_by_side(tables=tables) as machine:
        follower = machine.alive()[1]
        (older,) = machine.c.open.values()
        old, new = sorted(follower.pool.slots.values(), key=lambda slot: slot.version)
        for _ in range(4):
            newer = machine.c.open_episode()
            assert newer is not None and newer.version == 1
            follower.spawn(follower.call(newer, 150, pinned=False))
        machine.advance(0.5)
        assert (new.streams, old.streams) == (4, 0)
        follower.spawn(follower.call(older, 150, pinned=False))
        machine.advance(0.5)
        assert (new.streams, old.streams) == (4, 1)


@pytest.mark.parametrize("tables", [False, True])
def test_a_call_waits_at_a_follower_while_no_engine_is_new_enough(tables: bool) -> None:
    with versions_side_by_side(tables=tables) as machine:
        follower = machine.alive()[1]
        old, new = sorted(follower.pool.slots.values(), key=lambda slot: slot.version)
        machine.an_engine_dies([s.url for s in machine.c.servers].index(new.external_url), reported=False)
        machine.advance(20.0)
        assert (new.state != "open", old.state, old.version) == (True, "open", 0)
        newer = machine.c.open_episode()
        assert newer is not None and newer.version == 1
        follower.spawn(follower.call(newer, 12, pinned=False))
        machine.advance(5.0)
        assert (follower.pool.waiting, old.streams, old.version) == (1, 0, 0)
        assert old.state == "open"


@contextmanager
def two_engines() -> Iterator[tuple[LinkMachine, Process, Process]]:
    """Yield a coordinator and its first follower, after the first table."""
    machine = LinkMachine()
    try:
        machine.begin("abort", "rolling", 2, accounts=True)
        machine.advance(2.0)
        yield machine, machine.alive()[0], machine.alive()[1]
    finally:
        machine.teardown()


def calls_of(machine: LinkMachine, process: Process, count: int) -> None:
    """Begin `count` long calls, each in an episode of its own."""
    for _ in range(count):
        opened = machine.c.open_episode()
        assert opened is not None
        process.spawn(process.call(opened, 150, pinned=False))
        machine.advance(0.02)


def streams(process: Process) -> list[int]:
    return [slot.streams for _, slot in sorted(process.pool.slots.items())]


def test_a_follower_counts_the_calls_of_every_other_process_when_it_places_its_own() -> None:
    with two_engines() as (machine, coordinator, first):
        second = machine.alive()[2]
        calls_of(machine, coordinator, 1)
        calls_of(machine, second, 2)
        machine.advance(2.5)
        assert (streams(coordinator), streams(second)) == ([1, 0], [1, 1])
        calls_of(machine, first, 1)
        assert streams(first) == [0, 1], "it had none in either, and chose the first"


def test_a_follower_goes_on_by_the_tables_of_the_next_coordinator() -> None:
    with two_engines() as (machine, _, _):
        machine.the_coordinator_dies(0.0)
        machine.another_follows()
        machine.advance(5.0)
        coordinator = machine.c.coordinator
        assert coordinator is not None
        (follower,) = [process for process in machine.alive() if process is not coordinator]
        calls_of(machine, coordinator, 1)
        machine.advance(2.5)
        calls_of(machine, follower, 1)
        assert (streams(coordinator), streams(follower)) == ([1, 0], [0, 1])


def test_a_follower_chooses_alone_when_its_coordinators_program_has_stopped() -> None:
    with two_engines() as (machine, coordinator, first):
        calls_of(machine, coordinator, 1)
        machine.advance(2.5)
        assert coordinator.control is not None
        driver = coordinator.control.host._driver
        assert driver is not None
        driver.cancel()
        machine.advance(2.5)
        calls_of(machine, first, 1)
        assert streams(first) == [1, 0]
