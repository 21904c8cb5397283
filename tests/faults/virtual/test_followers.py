"""Duties of a follower and its coordinator, step by step. Each test has a mutant that the machine seldom finds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.cluster.hub import Hub
from gateway.cluster.messages import (
    pack,
    table_from_json,
    unpack,
)
from gateway.config import QueueSettings
from gateway.episodes.open_episode import OpenEpisode
from gateway.generation.plan_messages import Table
from gateway.generation.pool import EnginePool
from headgate.errors import Unavailable
from scheduler.program.calls import PeerLoad, PeerQueued, PeerRunning, Plan
from tests.faults.virtual.cluster import Opened
from tests.faults.virtual.links import LinkMachine, links
from tests.faults.virtual.processes import Process
from tests.harness.waiting import result_of, until


def alone(machine: LinkMachine) -> dict[str, Any]:
    """Cut every link, for both sides and for good; return what restores the network."""
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
        follower.spawn(follower.begin(live, 3, pinned=False))  # it had identified the caller just before
        machine.advance(3.0)
        assert (slot.streams, follower.runs()) == (0, 1)
        machine.c.network.hubs.update(hubs)
        machine.advance(5.0)
        assert follower.runs() == 0


def test_what_arrived_without_a_link_is_refused_if_the_weights_have_changed() -> None:
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


def test_an_end_is_served_when_all_is_recorded() -> None:
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


def test_a_late_response_settles_no_request_of_the_next_link() -> None:
    """Each link numbers its requests from 1: an end that was requested on the last one must not pass for another one's end."""
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
            assert list(coordinator.hub._links[follower.name]._pending) == [1]
        machine.advance(8.0)
        assert [work.recorded for work in follower.works] == [True, True]


def coordinator_next(machine: LinkMachine) -> Process:
    """Return a follower that succeeds the coordinator, as all other processes are dead."""
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


def test_a_request_to_a_process_that_becomes_the_coordinator_fails_with_the_reason() -> None:
    with links("abort") as machine:
        follower = machine.alive()[1]
        alone(machine)
        request = machine.c.loop.create_task(follower.follower.keyed("ep-any", 1000.0))
        machine.kill(machine.alive()[2])
        machine.the_coordinator_dies(0.0)
        machine.another_follows()
        assert request.done() and isinstance(request.exception(), Unavailable)


def served_by(machine: LinkMachine, process: Process) -> Opened:
    """Return an episode whose only call a process has served."""
    opened = machine.c.open_episode()
    assert opened is not None
    machine.c.loop.run(process.call(opened, 3, pinned=False), 5.0)
    return opened


def is_alone(machine: LinkMachine, process: Process, name: str) -> bool:
    """Return true if a process assumes that no other process serves an episode."""
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


def test_an_episode_of_an_earlier_coordinator_or_without_a_link_is_served_by_no_process_alone() -> None:
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
    """A follower that sends its name, and then nothing."""

    def __init__(self, **hello: Any) -> None:
        self.sent: list[str] = []
        self._hello = {"hello": True, "name": "p", "url": "http://p", "episodes": [], **hello}
        self._greeted = False

    async def receive_text(self) -> str:
        if self._greeted:
            await asyncio.Event().wait()
        self._greeted = True
        return pack(self._hello)

    async def send_text(self, data: str) -> None:
        self.sent.append(data)


async def test_a_follower_that_does_not_execute_commands_counts_as_disconnected() -> None:
    hub = Hub({}, {}, 0.05)
    serving = asyncio.create_task(hub.serve(Silent()))
    await until(lambda: bool(hub.describe()), "the follower is known", every_s=0)
    await hub.remove_engine("m", "e")
    await result_of(serving, "the silent one is let go")
    assert hub.describe() == []


async def test_a_table_has_the_calls_of_every_other_process_and_not_the_receivers_own() -> None:
    pool = EnginePool("m", QueueSettings(), 0.0)
    hub = Hub({"m": pool}, {"m": "vllm"}, 0.05)
    first = Silent(calls={"m": {"queued": [], "running": [["a", 3, 2]]}})
    second = Silent(name="q", calls={"m": {"queued": [[4, 1, 30]], "running": [["b", 4, 1]]}})
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
