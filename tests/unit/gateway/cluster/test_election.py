"""One process's part in an election, by what it reads: `tests/faults/virtual/test_election.py` has several on real databases."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.cluster.election import Election
from gateway.config import ClusterSettings
from gateway.store.coordination import Coordinator
from headgate.errors import Fenced, Unavailable
from tests.faults.virtual.clock import Clock, VirtualLoop

LEASE_S = 4.0


class Store:
    """Return what a test wrote, the last value repeatedly; a write takes `write_s`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seen: deque[Coordinator | Exception | None] = deque()
        self.claims: deque[int | Exception | None] = deque([None])
        self.reads = self.writes = 0
        self.write_s = 0.0

    async def read(self, _query: Any) -> Coordinator | None:
        self.reads += 1
        return _given(self.seen)

    async def submit(self, _write: Any) -> Any:
        self.writes += 1
        self.clock.now += self.write_s
        return _given(self.claims)


def _given(responses: deque[Any]) -> Any:
    response = responses.popleft() if len(responses) > 1 else responses[0]
    if isinstance(response, Exception):
        raise response
    return response


def other(left_s: float, fence: int = 3, holder: str = "other") -> Coordinator:
    return Coordinator(fence, holder, "http://other", left_s)


def away() -> Unavailable:
    return Unavailable("the database is away", retry_after=1.0, code="x")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gateway.cluster.election.time", clock)
    return clock


@pytest.fixture
def loop(clock: Clock) -> Iterator[VirtualLoop]:
    loop = VirtualLoop(clock)
    yield loop
    loop.end()


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(clock)


@pytest.fixture
def election(store: Store) -> Election:
    return Election(store, ClusterSettings(lease_s=LEASE_S), "me", "http://me")  # type: ignore[arg-type]


def test_another_lease_is_followed_and_an_unconfirmed_own_lease_is_not(
    loop: VirtualLoop, store: Store, election: Election
) -> None:
    """The response to a claim may have been lost: then the place is its own, by a fence that it cannot know to be its own."""
    store.seen.extend([other(2.0, holder="me"), other(1.0, holder="me"), other(2.0)])
    assert loop.run(election.decide(), 60) == other(2.0)


@pytest.mark.parametrize(
    ("seen", "reads"),
    [
        ([None], 1),
        ([other(-1e9)], 1),
        ([other(-0.5), other(-1.5)], 2),
        ([other(-0.5), other(-0.5, fence=4), other(-1.5, fence=4)], 3),
        ([other(-0.5), away(), other(-1.5), other(-2.0)], 4),
    ],
)
def test_a_free_place_is_claimed_immediately_and_an_expired_one_after_two_looks(
    loop: VirtualLoop, store: Store, election: Election, seen: list[Any], reads: int
) -> None:
    store.seen.extend(seen)
    store.claims = deque([7])
    assert loop.run(election.decide(), 60) == 7
    assert (store.reads, store.writes) == (reads, 1)


def test_a_lease_counts_from_the_moment_of_its_request(
    loop: VirtualLoop, clock: Clock, store: Store, election: Election
) -> None:
    store.claims, store.write_s = deque([5]), 3.0
    assert loop.run(election.seize()) == 5
    clock.now += 0.5
    loop.run(election.check_coordinator(5))
    assert store.writes == 1
    clock.now += 1.0
    loop.run(election.check_coordinator(5))
    assert store.writes == 2, "its lease may have ended"
    clock.now += 1.5
    loop.run(election.check_coordinator(5))
    assert store.writes == 3, "the renewal counts from its request, too"


def test_the_holder_renews_in_time_and_ends_with_its_successor(
    loop: VirtualLoop, store: Store, election: Election
) -> None:
    fenced = Fenced("another", retry_after=1.0, code="fenced")
    store.claims = deque([None, away(), None, None, fenced])
    holding = loop.create_task(election.hold(5))
    loop.advance(LEASE_S * 1.4)
    assert (store.writes, holding.done()) == (4, False)
    loop.advance(LEASE_S)
    assert isinstance(holding.exception(), Fenced)


@pytest.mark.parametrize("change", [None, other(1.0, fence=4), other(-0.1)])
def test_a_change_is_noticed_and_a_renewal_is_none(
    loop: VirtualLoop, store: Store, election: Election, change: Coordinator | None
) -> None:
    store.seen.extend([other(1.0), away(), other(2.0)])
    waiting = loop.create_task(election.changed(3))
    loop.advance(LEASE_S * 3)
    assert not waiting.done()
    store.seen = deque([change])
    election.coordinator_changed()
    loop.settle()
    assert waiting.done(), "news are read immediately"


def test_news_are_heard_once(loop: VirtualLoop, store: Store, election: Election) -> None:
    store.seen.append(other(1.0))
    loop.create_task(election.changed(3))
    loop.settle()
    election.coordinator_changed()
    loop.settle()
    assert store.reads == 1
    loop.advance(LEASE_S / 4)
    assert store.reads == 1
