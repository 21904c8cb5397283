"""Duties of a follower and its coordinator, step by step. Each test has a mutant that the machine seldom finds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from gateway.control.coordinator_placement import ControlPlacement
from gateway.control.follower_placement import FollowerPlacement
from gateway.episodes.open_episode import OpenEpisode
from gateway.errors import Unavailable
from gateway.peers.hub import Hub
from gateway.peers.messages import pack, table_from_json, unpack
from gateway.rollout.plan_messages import Table
from gateway.rollout.pool import EnginePool
from gateway.sections import QueueSettings
from scheduler.program.calls import PeerLoad, PeerQueued, PeerRunning, Plan
from scheduler.program.placement import Placement
from scheduler.reactor import Context
from tests.harness.waiting import result_of, until
from tests.machines.cluster import Opened
from tests.machines.links import LinkMachine, links
from tests.machines.processes import Process


def alone(machine: LinkMachine) -> dict[str, Any]:
    """Every link is cut, both sides know, and there is no way back; answers what makes one."""
    hubs = dict(machine.c.network.hubs)
    machine.c.network.hubs.clear()
    for link in list(machine.c.network.live()):
        link.cut(0.0, 0.0)
    machine.advance(0.1)
    return hubs


def test_without_a_link_nothing_begins_in_an_engine() -> None:
    with links("keep") as machine:
        machine.call(1, 3, False, True)
        machine.advance(2.0)
        follower = machine.alive()[1]
        (slot,) = follower.pool.slots.values()
        hubs = alone(machine)
        assert slot.state == "held"
        (name,) = machine.c.open
        live = OpenEpisode(name, "t", "g", "eval", "m", 0.0, 0.0)
        follower.spawn(follower.begin(live, 3, pinned=False))  # it had asked just before whose call it is
        machine.advance(3.0)
        assert (slot.streams, follower.runs()) == (0, 1)
        machine.c.network.hubs.update(hubs)
        machine.advance(5.0)
        assert follower.runs() == 0


def test_what_arrived_without_a_link_is_not_taken_if_the_weights_changed_meanwhile() -> None:
    with links("keep", accounts=False) as machine:
        machine.call(1, 150, False, True)
        machine.advance(0.5)
        hubs = alone(machine)
        machine.publish()
        machine.advance(3.0)
        assert machine.c.servers[0].weights == 1
        machine.c.network.hubs.update(hubs)
        machine.advance(30.0)
        assert all(work.recorded for work in machine.alive()[1].works)


def test_what_arrives_is_not_taken_if_the_link_comes_back_in_the_middle_of_an_update() -> None:
    with links("keep", accounts=False) as machine:
        machine.call(1, 150, False, True)
        machine.advance(0.5)
        hubs = alone(machine)
        machine.c.servers[0].work_s = 1.0
        machine.publish()
        slot = next(iter(machine.c.coordinator.pool.slots.values()))  # type: ignore[union-attr]
        while slot.settled:
            machine.advance(0.1)
        machine.c.network.hubs.update(hubs)
        machine.advance(0.5)
        (link,) = [link for link in machine.c.network.live() if link.follower == machine.alive()[1].name]
        link.down.lag_s = 2.0
        machine.advance(30.0)
        assert machine.c.servers[0].weights == 1


def test_an_end_is_answered_when_all_is_recorded() -> None:
    with links("abort") as machine:
        machine.call(1, 150, False, True)
        machine.advance(0.5)
        machine.c.record_s = 1.0
        machine.end_episode(0)
        machine.advance(5.0)
        assert [work.recorded for work in machine.alive()[1].works] == [True]


def test_an_episode_that_ended_while_there_was_no_link_ends_when_it_is_back() -> None:
    with links("abort") as machine:
        machine.call(1, 150, False, True)
        machine.advance(0.5)
        hubs = alone(machine)
        machine.end_episode(0)
        machine.advance(1.0)
        assert not machine.alive()[1].works[0].recorded
        machine.c.network.hubs.update(hubs)
        machine.advance(3.0)
        assert machine.alive()[1].works[0].recorded
        assert len(machine.alive()[1].works[0].call.turn.ids) < 100


def test_a_late_answer_settles_no_request_of_the_next_link() -> None:
    """Each link numbers its requests from 1: an end that was asked on the last one must not pass for another one's end."""
    with links("abort") as machine:
        coordinator, follower = machine.alive()[0], machine.alive()[1]
        for _ in range(2):
            opened = machine.c.open_episode()
            assert opened is not None
            follower.spawn(follower.call(opened, 150, pinned=False))
        machine.c.record_s = 3.0
        for _ in range(2):
            machine.c.network.hubs.update(alone(machine))
            machine.advance(1.0)
            machine.end_episode(0)
            machine.advance(0.5)
            assert list(coordinator.hub._links[follower.name]._asked) == [1]
        machine.advance(8.0)
        assert [work.recorded for work in follower.works] == [True, True]


def coordinator_next(machine: LinkMachine) -> Process:
    """A follower that succeeds the coordinator, and nobody else can: the others are dead."""
    machine.kill(machine.alive()[2])
    machine.the_coordinator_dies(0.0)
    machine.another_follows()
    process = machine.c.coordinator
    assert process is not None
    assert machine.alive() == [process]
    return process


@pytest.mark.parametrize("ended_without_it", [False, True])
def test_calls_of_a_follower_that_becomes_the_coordinator_end_with_their_episode(
    ended_without_it: bool,
) -> None:
    """Also where the episode ended while the follower had no link."""
    with links("abort") as machine:
        machine.call(1, 150, False, True)
        machine.advance(0.5)
        if ended_without_it:
            alone(machine)
            machine.end_episode(0)
            machine.advance(1.0)
        process = coordinator_next(machine)
        (work,) = process.works
        if not ended_without_it:
            assert not work.recorded
            machine.end_episode(0)
        machine.advance(2.0)
        assert work.recorded
        assert len(work.call.turn.ids) < 100


def test_an_end_stops_the_coordinators_own_calls() -> None:
    with links("abort") as machine:
        machine.call(0, 150, False, True)
        machine.advance(0.5)
        machine.end_episode(0)
        machine.advance(1.0)
        (work,) = machine.alive()[0].works
        assert work.recorded
        assert len(work.call.turn.ids) < 20


def test_requests_of_followers_are_given_back_but_for_those_that_cannot_move() -> None:
    with links("abort") as machine:
        machine.call(1, 150, False, True)
        machine.call(1, 150, True, False)
        machine.advance(0.5)
        coordinator, follower = machine.alive()[0], machine.alive()[1]
        (shown,) = coordinator.pool.slots.values()
        (slot,) = follower.pool.slots.values()
        before = set(slot.runs)
        assert (slot.streams, slot.pinned) == (2, 1)
        pinned = {name for name, run in slot.runs.items() if run.pinned}

        async def give_back() -> None:
            await coordinator.hub.give_back("m", shown)

        machine.c.loop.run(give_back(), 5.0)
        machine.advance(0.2)
        assert before & set(slot.runs) == pinned


def test_the_coordinator_knows_what_runs_elsewhere_and_at_once_what_an_end_has_changed() -> None:
    with links("abort") as machine:
        machine.call(1, 150, False, True)
        machine.call(1, 150, True, False)
        machine.advance(1.0)
        coordinator = machine.alive()[0]
        (name,) = machine.c.open
        (slot,) = coordinator.pool.slots
        found = [coordinator.hub.count_runs("m", slot)]

        async def end() -> None:
            del machine.c.open[name]
            machine.c.over.add(name)
            await coordinator.control.episodes.abandon(name, "over")
            found.append(coordinator.hub.count_runs("m", slot))

        machine.c.loop.run(end(), 5.0)
        assert found == [(2, 1), (0, 0)]


def test_who_asks_a_process_that_becomes_the_coordinator_is_told_so() -> None:
    with links("abort") as machine:
        follower = machine.alive()[1]
        alone(machine)
        asking = machine.c.loop.create_task(follower.follower.keyed("ep-any", 1000.0))
        machine.kill(machine.alive()[2])
        machine.the_coordinator_dies(0.0)
        machine.another_follows()
        assert asking.done() and isinstance(asking.exception(), Unavailable)


async def _nothing(_placement: ControlPlacement) -> None:
    """Stands for `ControlPlacement.read_loads`."""


_pull = Placement._pull


def _pull_once(reactor: Placement, now: Context) -> bool:
    """Stands for `Placement._pull`: an engine pulls when a version is there, and none later."""
    return now.present(reactor.target) and _pull(reactor, now)


@contextmanager
def versions_side_by_side(*, tables: bool) -> Iterator[LinkMachine]:
    """Two engines under `pull`, at versions 1 and 0: nobody tells the second to come. An episode is older.

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
    """The newer engine has more to do, so that the older one would be chosen but for the V of the call."""
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
        machine.an_engine_dies([s.url for s in machine.c.servers].index(new.external_url), told=False)
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
    """A coordinator and its followers, who have had their first table; answers the first of them."""
    machine = LinkMachine()
    try:
        machine.begin("abort", "rolling", 2, accounts=True)
        machine.advance(2.0)
        yield machine, machine.alive()[0], machine.alive()[1]
    finally:
        machine.teardown()


def calls_of(machine: LinkMachine, process: Process, count: int) -> None:
    """That many long calls begin, each in an episode of its own."""
    for _ in range(count):
        opened = machine.c.open_episode()
        assert opened is not None
        process.spawn(process.call(opened, 150, pinned=False))
        machine.advance(0.02)


def streams(process: Process) -> list[int]:
    return [slot.streams for _, slot in sorted(process.pool.slots.items())]


def test_a_follower_places_its_calls_beside_those_of_every_other_process() -> None:
    with two_engines() as (machine, coordinator, first):
        second = machine.alive()[2]
        calls_of(machine, coordinator, 1)
        calls_of(machine, second, 2)
        machine.advance(2.5)
        assert (streams(coordinator), streams(second)) == ([1, 0], [1, 1])
        calls_of(machine, first, 1)
        assert streams(first) == [0, 1], "it had none in either, and took the first"


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


def served_by(machine: LinkMachine, process: Process) -> Opened:
    """An episode that a process has served a call of, and no other one has."""
    opened = machine.c.open_episode()
    assert opened is not None
    machine.c.loop.run(process.call(opened, 3, pinned=False), 5.0)
    return opened


def is_alone(machine: LinkMachine, process: Process, name: str) -> bool:
    """True if a process takes it that it alone serves an episode."""
    return bool(machine.c.loop.run(process.services.current_role.serves_exclusively(name), 5.0))


def test_a_process_serves_an_episode_alone_until_another_one_does() -> None:
    with links("abort") as machine:
        first, second = machine.alive()[1:3]
        opened = served_by(machine, first)
        assert [is_alone(machine, process, opened.id) for process in (first, second)] == [True, False]
        machine.c.loop.run(second.call(opened, 3, pinned=False), 5.0)
        assert [is_alone(machine, process, opened.id) for process in (first, second)] == [False, False], (
            "the first knows before the second begins"
        )


def test_a_follower_that_the_coordinator_joins_is_alone_no_more_and_neither_is_the_coordinator() -> None:
    with links("abort") as machine:
        follower = machine.alive()[1]
        opened = served_by(machine, follower)
        (link,) = [link for link in machine.c.network.live() if link.follower == follower.name]
        link.down.lag_s = 1.0
        asking = [
            machine.alive()[0].spawn(machine.alive()[0].services.current_role.serves_exclusively(opened.id))
            for _ in range(2)
        ]
        machine.advance(0.5)
        assert not any(task.done() for task in asking), "both wait until the follower knows"
        machine.advance(3.0)
        assert [task.result() for task in asking] == [False, False]
        assert not is_alone(machine, follower, opened.id)


def test_nobody_serves_an_episode_alone_that_an_earlier_coordinator_knew_or_without_a_link() -> None:
    with links("abort") as machine:
        follower = machine.alive()[1]
        opened = served_by(machine, follower)
        hubs = alone(machine)
        assert not is_alone(machine, follower, opened.id)
        machine.c.network.hubs.update(hubs)
        machine.the_coordinator_dies(0.0)
        machine.another_follows()
        for process in machine.alive():
            machine.c.loop.run(process.call(opened, 3, pinned=False), 5.0)
        assert not any(is_alone(machine, process, opened.id) for process in machine.alive())


class Silent:
    """A follower that says who it is, and then nothing."""

    def __init__(self, **hello: Any) -> None:
        self.sent: list[str] = []
        self._hello = {"hello": True, "name": "p", "url": "http://p", "episodes": [], **hello}
        self._said = False

    async def receive_text(self) -> str:
        if self._said:
            await asyncio.Event().wait()
        self._said = True
        return pack(self._hello)

    async def send_text(self, data: str) -> None:
        self.sent.append(data)


async def test_who_does_not_do_what_it_is_asked_counts_as_gone() -> None:
    hub = Hub({}, {}, 0.05)
    serving = asyncio.create_task(hub.serve(Silent()))
    await until(lambda: bool(hub.describe()), "the follower is known", every_s=0)
    await hub.remove_engine("m", "e")
    await result_of(serving, "the silent one is let go")
    assert hub.describe() == []


async def test_a_table_has_the_calls_of_every_other_process_and_not_the_receivers_own() -> None:
    pool = EnginePool("m", QueueSettings(), 0.0)
    hub = Hub({"m": pool}, {"m": "vllm"}, 0.05)
    first = Silent(calls={"m": {"queued": [], "held": [["a", 3, 2]]}})
    second = Silent(name="q", calls={"m": {"queued": [[4, 1, 30]], "held": [["b", 4, 1]]}})
    serving = [asyncio.create_task(hub.serve(one)) for one in (first, second)]
    await until(lambda: len(hub.describe()) == 2, "both are known", every_s=0)
    assert hub.peer_load("m") == PeerLoad(
        3, (PeerQueued(4, 1, 30),), (PeerRunning("a", 3, 2), PeerRunning("b", 4, 1))
    )
    hub.send_table("m", Table((), Plan(4)))
    await until(lambda: len(second.sent) == 2, "it has a welcome and a table", every_s=0)
    table = table_from_json(unpack(second.sent[1]))
    assert table.peer_load == PeerLoad(3, (), (PeerRunning("a", 3, 2),)), "its own are not in it"
    hub.close()
    await asyncio.gather(*serving)
