"""Choice of engines for calls, by a process alone and by the coordinator's control program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway.config import QueueSettings
from gateway.config.settings import Settings
from gateway.control.coordinator_placement import ControlPlacement
from gateway.control.host import ControlHost, ModelEngines
from gateway.engines.base import Load, TokenChunk
from gateway.generation.call import Call
from gateway.generation.peers import NoPeers
from gateway.generation.pool import EnginePool
from gateway.generation.slot_placer import PlacementRequest
from headgate.errors import Unavailable
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import Arrived, CallDeparted, Closed, Demand, EngineLoad, Opened, Snapshot
from scheduler.reactor import PhysicalAction
from tests.harness.waiting import turns, until
from tests.unit.gateway.generation.pool_calls import asks, call, inside, opened

T = TypeVar("T")


@pytest.fixture
async def pool() -> EnginePool:
    return EnginePool("demo", QueueSettings(max_waiting=2))


async def test_a_call_goes_where_least_runs_of_what_may_sample_it(pool: EnginePool) -> None:
    old, new, held = opened(pool, "a", 1), opened(pool, "b", 2), opened(pool, "c", 2)
    held.hold()
    inside(new, *(call(f"r{i}") for i in range(5)))
    assert await asks(pool, call("young", 2)) is new
    assert await asks(pool, call("old", 1)) is old


async def test_a_call_goes_where_its_tokens_are_cached_and_not_where_it_failed(pool: EnginePool) -> None:
    opened(pool, "a")
    cached = opened(pool, "b")
    one = call("one")
    pool.remember(one, cached)
    assert await asks(pool, one) is cached
    one.avoid_engine("b")
    assert (await asks(pool, one)).name == "a"
    one.redirect("b")
    assert await asks(pool, one) is cached, "it was sent there"


async def test_calls_that_wait_get_what_opens_in_their_order_and_each_once(pool: EnginePool) -> None:
    tasks = [asks(pool, call(name, version)) for name, version in (("new", 2), ("first", 1))]
    await turns()
    assert pool.waiting == 2
    opened(pool, "a", 1)
    pool.notify()  # a repeated notice wakes no call twice
    await turns()
    assert [task.done() for task in tasks] == [False, True]
    pool.notify()
    await turns()
    opened(pool, "b", 2)
    assert (await tasks[0]).name == "b"
    assert pool.waiting == 0


async def test_who_waited_first_is_let_in_first(pool: EnginePool) -> None:
    order: list[str] = []
    tasks = [asks(pool, call(name)) for name in ("first", "second")]
    for task in tasks:
        task.add_done_callback(lambda done: order.append(done.get_name()))
    await turns()
    opened(pool, "a")
    await asyncio.gather(*tasks)
    await turns()
    assert order == ["first", "second"]


async def test_who_waits_no_more_is_given_nothing_and_makes_room(pool: EnginePool) -> None:
    gone, waits = asks(pool, call("gone")), asks(pool, call("waits"))
    await turns()
    with pytest.raises(Unavailable, match="too many calls wait"):
        await asks(pool, call("many"))
    gone.cancel()
    await asyncio.wait({gone})
    late = asks(pool, call("late"))
    await turns()
    assert pool.waiting == 2
    slot = opened(pool, "a")
    assert [await task for task in (waits, late)] == [slot, slot]


class Recording:
    """Choose nothing, and record the calls."""

    def __init__(self) -> None:
        self.call_ids: list[str] = []

    def submit(self, request: PlacementRequest) -> None:
        self.call_ids.append(request.call.call_id)

    def cancel(self, request: PlacementRequest) -> None:
        pass

    def left(self, call: Call) -> None:
        pass

    def changed(self) -> None:
        pass

    def retire(self) -> list[PlacementRequest]:
        return []


async def test_who_chooses_no_more_gives_nothing(pool: EnginePool) -> None:
    """Although an engine had opened, and the call's turn was about to come."""
    task, other = asks(pool, call("one")), Recording()
    await turns()
    opened(pool, "a")
    pool.set_placer(other)
    await turns()
    assert (task.done(), other.call_ids) == (False, ["one"])
    task.cancel()
    await asyncio.wait({task})


class Host(ControlHost):
    """Record what is reported of calls and engines."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.heard: list[Any] = []

    def inject(self, action: PhysicalAction[T], value: T, *, now: bool = False) -> None:
        self.heard.append(value)
        super().inject(action, value, now=now)


class PeerLoad(NoPeers):
    """Peers with three running calls in every engine."""

    def count_runs(self, model: str, name: str) -> tuple[int, int]:
        return 3, 0


class Engine:
    """Report `load` once `may` is set."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.called, self.may = asyncio.Event(), asyncio.Event()

    async def read_load(self) -> Load:
        self.called.set()
        await self.may.wait()
        return self.load


async def leads() -> None:
    """Confirm this process as the coordinator."""


@dataclass
class Coordinator:
    """A pool whose calls the control program places."""

    host: Host
    pool: EnginePool
    placement: ControlPlacement

    @property
    def inside(self) -> dict[str, str]:
        """The engine of each call according to the control program."""
        return {name: run.engine for name, run in self.placement.reactor._runs.items()}

    def heard(self, *kinds: type) -> list[Any]:
        """Return and forget the recorded values of the given types."""
        found = [value for value in self.host.heard if isinstance(value, kinds)]
        self.host.heard = [value for value in self.host.heard if not isinstance(value, kinds)]
        return found


@pytest.fixture
async def coordinator(pool: EnginePool, tmp_path: Path) -> AsyncIterator[Coordinator]:
    settings = Settings.parse(
        {"models": {"demo": {"path": "/m"}}, "control": {"recording": str(tmp_path / "control.jsonl")}}
    )
    models = {"demo": ModelEngines(pool, None, settings.engine)}  # type: ignore[arg-type]
    host = Host(settings, models, PeerLoad(), leads, {"demo": 0})
    placement = ControlPlacement(host, "demo", pool, PeerLoad(), EngineModel())
    host.start()
    host.begin("demo", 0)
    placement.begin()
    yield Coordinator(host, pool, placement)
    await placement.close()
    await host.close()


async def test_the_program_learns_when_an_engine_opens_changes_and_closes(coordinator: Coordinator) -> None:
    pool = coordinator.pool
    slot = opened(pool, "a", 1)
    assert coordinator.heard(Opened, Closed) == [Opened("a", 1)]
    pool.notify()
    assert coordinator.heard(Opened, Closed) == []
    opened(pool, "a", 2)
    opened(pool, "a", 2)  # it was closed and opened before anybody looked: what it had cached is gone
    assert coordinator.heard(Opened, Closed) == [Opened("a", 2)] * 2
    slot.hold()
    pool.notify()
    assert coordinator.heard(Opened, Closed) == [Closed("a")]
    opened(pool, "a", 2)
    del pool.slots["a"]
    pool.notify()
    assert coordinator.heard(Opened, Closed) == [Opened("a", 2), Closed("a")]


async def test_the_program_learns_once_of_a_calls_arrival_and_once_of_its_end(
    coordinator: Coordinator,
) -> None:
    pool = coordinator.pool
    opened(pool, "a")
    one, two = call("one"), call("two")
    assert (await asks(pool, one)).name == "a"
    await turns()
    assert coordinator.inside == {"one": "a"}
    pool.release(one)
    assert (await asks(pool, two)).name == "a"
    await turns()
    assert coordinator.inside == {"two": "a"}
    pool.release(two)
    await until(lambda: coordinator.inside == {}, "the end is reported, although no other call came")
    demands = coordinator.heard(Demand)
    assert [one.call for demand in demands for one in demand.arrived] == ["one", "two"]
    assert [left for demand in demands for left in demand.left] == [
        CallDeparted("one", 10),
        CallDeparted("two", 10),
    ]


async def test_the_program_gets_the_requirements_of_a_call(coordinator: Coordinator) -> None:
    pool = coordinator.pool
    slot = opened(pool, "a", 7)
    opened(pool, "b", 7)
    one = call("one", 7, seed=1)
    pool.remember(one, slot)
    one.begin_run("b", 7, "one.0.0")
    one.append_chunk(TokenChunk([1, 2], [-0.5, -0.5]))
    one.leave_engine()
    one.redirect("a", leaving="b")
    assert await asks(pool, one) is slot
    (demand,) = coordinator.heard(Demand)
    assert demand.arrived == (
        Arrived("one", 7, 12, cached_in="a", cached=10, avoid=("b",), pinned=True, preferred="a"),
    )


async def test_who_waits_no_more_is_forgotten(coordinator: Coordinator) -> None:
    task = asks(coordinator.pool, call("one"))
    await turns()
    assert (coordinator.placement.reactor.waiting, len(coordinator.placement._waiting)) == (1, 1)
    task.cancel()
    await asyncio.wait({task})
    await turns()
    assert (coordinator.placement.reactor.waiting, len(coordinator.placement._waiting)) == (0, 0)


async def test_who_goes_when_an_engine_was_chosen_for_it_has_left(coordinator: Coordinator) -> None:
    pool = coordinator.pool
    opened(pool, "a")
    task = asks(pool, call("one"))
    await until(lambda: "one" in coordinator.inside, "an engine was chosen", every_s=0)
    assert not task.done(), "its turn has not come"
    task.cancel()
    await asyncio.wait({task})
    await until(lambda: coordinator.inside == {}, "it left the engine")
    assert coordinator.placement.reactor.waiting == 0


async def test_the_end_of_a_call_is_reported_with_the_next_call_or_immediately_while_one_waits(
    coordinator: Coordinator,
) -> None:
    pool = coordinator.pool
    opened(pool, "a", 1)
    one, two = call("one"), call("two")
    await asks(pool, one)
    pool.release(one)
    await asks(pool, two)
    waits = asks(pool, call("waits", 2))
    await turns()
    pool.release(two)
    await turns()
    demands = [
        ([left.call for left in d.left], [a.call for a in d.arrived]) for d in coordinator.heard(Demand)
    ]
    assert demands == [([], ["one"]), (["one"], ["two"]), ([], ["waits"]), (["two"], [])]
    waits.cancel()
    await asyncio.wait({waits})


async def test_who_is_refused_because_too_many_wait_does_not_wait_in_the_program(
    coordinator: Coordinator,
) -> None:
    pool = coordinator.pool
    tasks = [asks(pool, call(name)) for name in ("one", "two")]
    await turns()
    with pytest.raises(Unavailable, match="too many calls wait"):
        await asks(pool, call("three"))
    await turns()
    assert (pool.waiting, coordinator.placement.reactor.waiting) == (2, 2)
    slot = opened(pool, "a")
    assert [await task for task in tasks] == [slot, slot]
    assert coordinator.inside == {"one": "a", "two": "a"}


async def test_after_the_program_closes_the_process_places_the_calls(coordinator: Coordinator) -> None:
    pool = coordinator.pool
    waits = asks(pool, call("waits"))
    await turns()
    asking = asks(pool, call("asking"))
    await turns(1)
    await coordinator.placement.close()
    slot = opened(pool, "a")
    assert [await waits, await asking] == [slot, slot]


async def test_when_the_program_has_stopped_the_process_chooses(coordinator: Coordinator) -> None:
    slot, driver = opened(coordinator.pool, "a"), coordinator.host._driver
    assert driver is not None
    driver.cancel()
    await asyncio.wait({driver})
    assert await asks(coordinator.pool, call("one")) is slot


async def test_an_engines_own_load_counts_in_addition_to_the_gateways_runs(coordinator: Coordinator) -> None:
    pool = coordinator.pool
    busy, silent = opened(pool, "a"), opened(pool, "b")
    one = call("one")
    inside(busy, one)
    busy.engine = engine = Engine(Load(running=1, waiting=9, kv=4, sampled=0))  # type: ignore[assignment]
    engine.may.set()
    await coordinator.placement.read_loads()
    (seen,) = coordinator.heard(Snapshot)
    assert seen.engines == (
        EngineLoad("a", 0, 4, 10, 0.0),  # one of ours and three of theirs; the call has ten tokens
        EngineLoad("b", 3, 0, 0, 0.0),
    )
    engine.load = Load(running=3, waiting=1, kv=500, sampled=0)
    await coordinator.placement.read_loads()
    assert coordinator.heard(Snapshot)[0].engines[0] == EngineLoad("a", 3, 1, 500, 0.0)
    assert silent.state == "open"


async def test_the_load_of_an_engine_that_closes_meantime_is_not_reported(coordinator: Coordinator) -> None:
    pool = coordinator.pool
    slot = opened(pool, "a")
    opened(pool, "b")
    slot.engine = engine = Engine(Load(0, 0, 0, 0))  # type: ignore[assignment]
    look = asyncio.create_task(coordinator.placement.read_loads(), name="look")
    await engine.called.wait()
    slot.hold()
    pool.notify()
    engine.may.set()
    await look
    (seen,) = coordinator.heard(Snapshot)
    assert [one.engine for one in seen.engines] == ["b"]
