"""Calls of a process that follows: placed by the coordinator's tables, between tables by what this process does."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cluster.follower_placement import FollowerPlacement
from gateway.cluster.messages import (
    counts_from_json,
    counts_to_json,
    pack,
    table_from_json,
    table_to_json,
    unpack,
)
from gateway.config import QueueSettings
from gateway.generation.plan_messages import CallCounts, Table, peer_load_of
from gateway.generation.pool import EnginePool
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import EngineLoad, PeerLoad, PeerQueued, PeerRunning, Plan
from scheduler.program.placement import PlacementSettings
from tests.harness.waiting import turns
from tests.unit.gateway.generation.pool_calls import asks, call, inside, opened

ROOM_FOR_3 = EngineModel(0.0, 1.0, 0.5, 1.0)


@pytest.fixture
async def pool() -> EnginePool:
    return EnginePool("demo", QueueSettings(max_waiting=9))


def follows(pool: EnginePool, rule: str = "cached", **given: Any) -> FollowerPlacement:
    return FollowerPlacement(
        "demo", pool, PlacementSettings.of({"choice": {"rule": rule, "min_gain_share": 0.3}, **given})
    )


def table(*held: PeerRunning, queued: tuple[PeerQueued, ...] = (), **given: Any) -> Table:
    names = sorted({one.engine for one in held})
    engines = tuple(EngineLoad(name, 0, 0, 0, 0.0) for name in names)
    return Table(engines, Plan(given.pop("newest", 0)), peer_load=PeerLoad(2, queued, held), **given)


async def test_a_call_goes_where_other_processes_have_least(pool: EnginePool) -> None:
    a, b = opened(pool, "a"), opened(pool, "b")
    assert await asks(pool, call("before")) is a, "nothing is known of others"
    placement = follows(pool)
    placement.apply_table(table(PeerRunning("a", 0, 3), PeerRunning("b", 0, 1)))
    assert await asks(pool, call("one")) is b
    placement.apply_table(table(PeerRunning("a", 0, 0), PeerRunning("b", 0, 1)))
    assert await asks(pool, call("two")) is a


async def test_calls_of_this_process_count_as_they_are_now_and_not_as_they_were_reported(
    pool: EnginePool,
) -> None:
    """The coordinator counted none of its three calls in `a`, or five that are over."""
    a, b = opened(pool, "a"), opened(pool, "b")
    inside(a, *(call(f"r{i}") for i in range(3)))
    placement = follows(pool)
    for counted in (0, 5):
        stale = (EngineLoad("a", counted, 0, 0, 0.0), EngineLoad("b", 2, 0, 0, 0.0))
        placement.apply_table(Table(stale, Plan(0), peer_load=PeerLoad(2, (), (PeerRunning("b", 0, 2),))))
        one = call(f"one-{counted}")
        assert await asks(pool, one) is b
        pool.release(one)
        await turns()


async def test_calls_wait_here_in_the_order_of_their_v_and_for_room(pool: EnginePool) -> None:
    slot = opened(pool, "a", 1)
    placement = follows(pool, "gain")
    speeds = {"a": ROOM_FOR_3}
    placement.apply_table(table(PeerRunning("a", 0, 3), speeds=speeds))
    young, old = asks(pool, call("young", 1)), asks(pool, call("old", 0))
    await turns()
    assert (young.done(), old.done(), pool.waiting) == (False, False, 2)
    assert pool.counts().queued == ((0, 1, 10), (1, 1, 10))
    placement.apply_table(table(PeerRunning("a", 0, 2), speeds=speeds))
    await turns()
    assert (young.done(), old.done()) == (False, True)
    placement.apply_table(table(PeerRunning("a", 0, 0), queued=(PeerQueued(0, 9, 10),), speeds=speeds))
    await turns()
    assert not young.done(), "older ones wait elsewhere"
    placement.apply_table(table(PeerRunning("a", 0, 0), speeds=speeds))
    assert await young is slot


async def test_calls_move_out_of_an_engine_in_whose_queue_they_wait(pool: EnginePool) -> None:
    a = opened(pool, "a")
    placement = follows(pool, "gain", migration={"waiting_above": 0})
    placement.apply_table(Table((), Plan(0), {"a": ROOM_FOR_3, "b": ROOM_FOR_3}))
    moved: list[tuple[str, str | None]] = []

    async def move(name: str, engine: str | None) -> None:
        moved.append((name, engine))

    pool.move = move  # type: ignore[method-assign]
    one = call("one")
    assert await asks(pool, one) is a
    inside(a, one)
    opened(pool, "b")
    placement.apply_table(
        Table(
            (EngineLoad("a", 2, 2, 40, 1.0),), Plan(0), peer_load=PeerLoad(2, (), (PeerRunning("a", 0, 3),))
        )
    )
    await turns()
    assert moved == [("one", "b")]


async def test_who_waits_goes_on_waiting_without_a_link_and_gets_what_opens(pool: EnginePool) -> None:
    placement = follows(pool)
    opened(pool, "a")
    placement.apply_table(table())
    pool.hold("there is no coordinator")
    waits = asks(pool, call("one"))
    await turns()
    assert (waits.done(), pool.waiting) == (False, 1)
    slot = opened(pool, "a")
    assert await waits is slot


@pytest.mark.parametrize("at", ["a call", "an engine"])
async def test_when_its_program_fails_the_process_chooses_alone(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    slot, placement = opened(pool, "a"), follows(pool)
    placement.apply_table(table())

    def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    part = placement.reactor._waterfall if at == "a call" else placement.reactor._engines
    monkeypatch.setattr(part, "place" if at == "a call" else "opened", fail)
    if at == "an engine":
        slot = opened(pool, "0")
    assert await asks(pool, call("one")) is slot
    placement.apply_table(table())
    assert await asks(pool, call("two")) is slot


async def test_tables_and_counts_come_as_they_were_sent(pool: EnginePool) -> None:
    slot = opened(pool, "a", 2)
    inside(slot, call("r0", 1), call("r1", 1), call("r2", 2))
    counts = pool.counts()
    assert counts == CallCounts((), (("a", 1, 2), ("a", 2, 1)))
    assert counts_from_json(unpack(pack(counts_to_json(counts)))) == counts
    seen = (EngineLoad("a", 3, 1, 500, 12.5),)
    sent = Table(seen, Plan(2, ("a",)), {"a": ROOM_FOR_3}, peer_load_of([counts, counts]))
    assert table_from_json(unpack(pack(table_to_json(sent)))) == sent


def test_what_several_processes_have_is_added_up() -> None:
    first = CallCounts(((0, 2, 30), (1, 1, 10)), (("a", 0, 2), ("b", 1, 1)))
    second = CallCounts(((0, 1, 60),), (("a", 0, 1), ("a", 1, 4)))
    assert peer_load_of([first, second, CallCounts()]) == PeerLoad(
        4,
        (PeerQueued(0, 3, 30), PeerQueued(1, 1, 10)),
        (PeerRunning("a", 0, 3), PeerRunning("a", 1, 4), PeerRunning("b", 1, 1)),
    )
