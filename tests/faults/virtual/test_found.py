"""Bugs that the machines have found, step by step: each test failed once."""

from __future__ import annotations

import pytest

from headgate.errors import Unavailable
from tests.faults.virtual.leases import LeaseMachine
from tests.faults.virtual.ledgers import LedgerMachine
from tests.faults.virtual.links import links


def test_an_engine_that_a_new_coordinator_has_opened_stays_open() -> None:
    """A follower that retired held every engine once more, and no process opened them again."""
    with links("abort") as machine:
        machine.the_coordinator_dies(0.0)
        machine.another_follows()


def test_tokens_of_new_weights_are_not_taken_for_old_ones_without_a_link() -> None:
    """A follower without a link learns of no crossing; its client left, so the engine gave no account."""
    with links("keep", accounts=False) as machine:
        cluster = machine.c
        machine.call(1, 150, False, True)
        machine.advance(0.5)
        hubs = dict(cluster.network.hubs)
        cluster.network.hubs.clear()  # and it finds no way back
        for _ in range(2):
            machine.a_link_is_cut(0, (0.0, 20.0))
        machine.publish()
        machine.advance(13.0)
        assert cluster.servers[0].weights == 1
        machine.client_goes_away(0)
        machine.advance(1.0)
        cluster.network.hubs.update(hubs)


def test_an_end_that_a_link_lost_is_sent_again() -> None:
    """The follower came back before the hub had noticed that it was gone: the end was not reported to it, and `end` returned."""
    with links("abort") as machine:
        machine.call(1, 150, False, True)
        machine.advance(0.5)
        for which in (0, 1):
            machine.a_link_is_cut(which, (0.4, 20.0))
        machine.end_episode(0)
        machine.advance(3.0)


def test_an_end_that_is_sent_twice_returns_when_its_calls_are_recorded() -> None:
    """The follower had begun with it when its link was cut; at the second request it knew none, and returned immediately."""
    with links("abort") as machine:
        machine.call(1, 150, False, True)
        machine.advance(0.5)
        machine.c.record_s = 3.0
        machine.end_episode(0)
        machine.advance(0.02)
        for which in (0, 1):
            machine.a_link_is_cut(which, (0.0, 20.0))
        machine.advance(8.0)


def test_an_ack_whose_response_was_lost_is_served_as_done() -> None:
    """Sent again it was refused, though the batch was consumed: the trainer would have gone back to its last checkpoint."""
    machine = LeaseMachine()
    try:
        machine.start()
        machine.groups_are_rewarded(1)
        machine.lease("a", old=False, received=True)
        machine.commit(old=False, count=3)
        machine.response("ack", 0, 2, old=False, checkpoint="one", received=True)
        machine.commit(old=False, count=3)
        machine.commit(old=False, count=3)  # what was not trained is read before the ack is written
        machine.another_coordinates(dies=True)
        machine.the_same_again(0)
        machine.commit(old=False, count=3)
        machine.what_is_stored_is_what_was_reported()
        assert len(machine.known.acked) == 1
    finally:
        machine.teardown()


def test_a_lease_that_is_given_while_the_last_one_is_being_acked_is_not_forgotten() -> None:
    """The end of the ack forgot it, and reported to its trainer that it held none."""
    machine = LeaseMachine()
    try:
        machine.start()
        machine.groups_are_rewarded(1)
        machine.lease("a", old=False, received=True)
        machine.commit(old=False, count=3)
        machine.response("ack", 0, 1, old=False, checkpoint="one", received=True)
        machine.lease("a", old=False, received=True)
        machine.commit(old=False, count=3)
        held = machine.now.leases.current()
        assert held is not None and held["fence"] == 2
    finally:
        machine.teardown()


def test_an_episode_that_a_successor_opened_is_not_closed_for_who_was_superseded() -> None:
    """The coordinator before reported to drivers that it was closed, for no reason: an error that they do not try again."""
    machine = LedgerMachine()
    try:
        machine.start()
        machine.another_coordinates(dies=False)
        machine.open(new=True, which=0, times=1, old=False, received=True, wait_s=0.0)
        machine.commit(old=False, count=1)
        (opened,) = machine.opened.values()
        request = machine.one(old=True).episodes.named(opened.episode_id)
        with pytest.raises(Unavailable, match="another gateway process"):
            machine.loop.run(request)
    finally:
        machine.teardown()


def test_an_engine_that_dies_while_a_new_coordinator_takes_it_over_is_waited_for() -> None:
    """The machine's settings were not those of a cluster, so it counted as never up, and was given up for good."""
    with links("keep") as machine:
        machine.the_coordinator_dies(0.0)
        machine.engines_are_slow(0, 0.0, 0.0, 1.0)
        machine.another_follows()
        machine.an_engine_dies(0, reported=False)
        machine.advance(20.0)
