"""The logs of running calls, step by step, on a bus in memory: who writes, who takes over, and what is shown when."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from gateway.bus.base import Entry, Outcome, Process
from gateway.bus.memory import MemoryBus
from gateway.config import BusSettings
from gateway.generation import call as generation
from gateway.generation.call_log import CallLog
from gateway.generation.handover import Handover
from gateway.generation.log_format import LoggedCall
from gateway.trajectories.recorder import TurnDetails
from gateway.trajectories.turn import Turn
from gateway.trajectories.turn_routes import TurnRoutes
from headgate.errors import BusUnavailable, Unavailable
from headgate.routes import RouterShape
from headgate.types import Sampling
from tests.harness.waiting import until

PLACE = "ep", "request"
PROMPT = np.asarray([1, 2, 3], np.int32)
DETAILS = TurnDetails("chat", True, {}, Sampling(max_tokens=100), 12.5, None, request_key="name" + "body")
ROUTERS = RouterShape(layers=(1,), top_k=2, experts=8, total_layers=2)
SETTINGS = BusSettings(heartbeat_ttl_s=60, log_s=60)
"""Nothing expires unless a test moves the clock."""


class Bus(MemoryBus):
    """Unavailable while `away`; `during` is called while a log is written."""

    def __init__(self) -> None:
        self.now = 0.0
        self.away = False
        self.unbroken = math.inf
        self.announced = 0
        self.during: Any = None
        super().__init__(SETTINGS, shared=True, clock=lambda: self.now)

    @property
    def unbroken_s(self) -> float:
        return self.unbroken

    async def announce(self, process: Process) -> None:
        self.announced += 1
        await super().announce(process)

    async def write(self, process: Process, entries: Sequence[Entry]) -> list[Outcome]:
        if self.away:
            raise BusUnavailable("it is away")
        if self.during is not None:
            during, self.during = self.during, None
            during()
        return await super().write(process, entries)


class Call:
    """A call that records the updates shown in its stream."""

    def __init__(self) -> None:
        self.turn = Turn("call", engine="e")
        self.turn.begin_run(0)
        self.staged = self.shown = 0
        self.superseded = 0

    def sample(self, *ids: int) -> None:
        self.turn.append(list(ids), [-0.5] * len(ids))

    def stage(self) -> None:
        self.staged = len(self.turn.ids)

    def flush(self) -> None:
        self.shown = self.staged

    async def supersede(self) -> None:
        self.superseded += 1


@pytest.fixture
def bus() -> Bus:
    return Bus()


@pytest.fixture
async def one(bus: Bus) -> AsyncIterator[Handover]:
    """Yield a process."""
    made = Handover(bus, Process("one", "http://one"), SETTINGS)
    await made.start()
    yield made
    bus.away = False
    await made.close()


@pytest.fixture
async def two(bus: Bus) -> AsyncIterator[Handover]:
    """Another one."""
    made = Handover(bus, Process("two", "http://two"), SETTINGS)
    await made.start()
    yield made
    await made.close()


async def followed(handover: Handover, call: Call, details: TurnDetails = DETAILS) -> CallLog:
    """Return a call that is logged."""
    track = handover.follow(PLACE, call, call.turn, PROMPT, details)
    await handover.flush()
    return track


async def begun(handover: Handover) -> tuple[Call, CallLog]:
    """Return a new call, and its log."""
    call = Call()
    return call, await followed(handover, call)


async def logged(handover: Handover) -> LoggedCall:
    (found,) = await handover.find(PLACE)
    return found


async def taken(one: Handover, two: Handover, bus: Bus) -> LoggedCall:
    """Let the process `one` count as dead, and `two` take over its call."""
    await bus.leave(one.process)
    found = await logged(two)
    assert two.can_take_over(found) and await two.take_over(found)
    return found


async def test_what_is_shown_was_logged_before(one: Handover, bus: Bus) -> None:
    call, track = await begun(one)
    call.sample(1, 2)
    assert track.mark_dirty() and call.shown == 0
    bus.during = lambda: call.sample(3)
    await one.flush()
    assert call.shown == 2
    call.sample(4)
    assert track.mark_dirty()
    await one.flush()
    assert call.shown == 4
    assert (await logged(one)).turn.ids == [1, 2, 3, 4]


async def test_a_process_that_stood_still_while_its_call_was_taken_shows_no_more_of_it(
    one: Handover, two: Handover, bus: Bus
) -> None:
    """Its write is cut by its own limit when it wakes up; the bus was never away."""
    call, track = await begun(one)
    found: list[LoggedCall] = []

    async def write(process: Process, entries: Sequence[Entry]) -> list[Outcome]:
        bus.write = Bus.write.__get__(bus)  # type: ignore[method-assign]
        found.append(await taken(one, two, bus))
        raise BusUnavailable("it stood still", stood_still=True)

    bus.write = write  # type: ignore[method-assign]
    call.sample(1, 2)
    track.mark_dirty()
    assert await one.flush()
    assert (call.shown, track.taken_over, len(found)) == (0, True, 1)


async def test_a_lost_log_is_written_again(one: Handover, bus: Bus) -> None:
    call, track = await begun(one)
    call.sample(1, 2)
    track.mark_dirty()
    await one.flush()
    bus.flush()
    call.sample(3)
    track.mark_dirty()
    await one.flush()
    await one.flush()
    assert (await logged(one)).turn.ids == [1, 2, 3]


async def test_a_bus_that_is_away_holds_nothing_up_and_hears_of_it_later(one: Handover, bus: Bus) -> None:
    call, track = await begun(one)
    bus.away = True
    call.sample(1, 2)
    track.mark_dirty()
    assert not await one.flush()
    assert call.shown == 2
    bus.away = False
    await one._beat()
    assert await one.flush()
    assert (await logged(one)).turn.ids == [1, 2]


async def test_a_call_that_was_taken_over_is_neither_shown_nor_recorded_any_more(
    one: Handover, two: Handover, bus: Bus
) -> None:
    call, track = await begun(one)
    call.sample(1)
    track.mark_dirty()
    await one.flush()
    await taken(one, two, bus)
    call.sample(2)
    track.mark_dirty()
    await one.flush()
    assert call.shown == 1
    await until(lambda: call.superseded == 1, "the call hears of it")
    with pytest.raises(Unavailable, match="another gateway process"):
        await track.assert_owner()
    track.end()
    await one.flush()
    assert (await logged(two)).log.owner == "two"


async def test_who_slept_until_its_call_was_over_elsewhere_shows_no_more_of_it(
    one: Handover, two: Handover, bus: Bus
) -> None:
    call, track = await begun(one)
    await two.drop(await taken(one, two, bus))
    assert await two.find(PLACE) == []
    call.sample(1, 2)
    track.mark_dirty()
    assert await one.flush() and await one.flush()
    assert (call.shown, track.taken_over) == (0, True)


async def test_who_slept_asks_before_it_records(one: Handover, two: Handover, bus: Bus) -> None:
    call = Call()
    await followed(one, call)
    await taken(one, two, bus)
    slept = Handover(bus, one.process, SETTINGS)  # its last heartbeat is long ago
    track = slept.follow(PLACE, call, call.turn, PROMPT, DETAILS)
    with pytest.raises(Unavailable, match="another gateway process"):
        await track.assert_owner()


async def test_who_takes_a_call_over_goes_on_with_its_log(one: Handover, two: Handover, bus: Bus) -> None:
    call = Call()
    call.sample(1, 2)
    await followed(one, call)
    found = await taken(one, two, bus)
    assert found.turn.ids == [1, 2]
    again = Call()
    again.turn = found.turn
    again.turn.begin_run(0)
    track = two.follow(PLACE, again, again.turn, PROMPT, DETAILS, found.log.epoch + 1)
    again.sample(3)
    track.mark_dirty()
    await two.flush()
    log = await logged(two)
    assert (log.turn.ids, log.log.owner, log.log.epoch) == ([1, 2, 3], "two", 2)


async def test_nothing_is_taken_from_the_living(one: Handover, two: Handover) -> None:
    await followed(one, Call())
    found = await logged(two)
    assert not two.can_take_over(found)
    assert not await two.take_over(found)
    assert (await logged(two)).log.owner == "one"


async def test_a_call_whose_sampler_has_a_state_is_found_and_never_taken(
    one: Handover, two: Handover, bus: Bus
) -> None:
    call = Call()
    pinned = replace(DETAILS, used=Sampling(max_tokens=100, seed=1))
    track = await followed(one, call, pinned)
    call.sample(1)
    assert not track.mark_dirty()  # so it is shown immediately
    await bus.leave(one.process)
    found = await logged(two)
    assert found.request_key == "namebody"
    assert not two.can_take_over(found)


async def test_a_stream_that_may_have_shown_more_than_was_logged_starts_over(
    one: Handover, two: Handover, bus: Bus
) -> None:
    await followed(one, Call())
    await bus.leave(one.process)
    bus.now, bus.unbroken = 10.0, 5.0
    found = await logged(two)
    assert not two.can_take_over(found)
    assert found.details is not None
    assert two.can_take_over(replace(found, details=replace(found.details, stream=False)))
    bus.unbroken = 20.0
    assert two.can_take_over(found)


async def test_the_log_of_a_call_that_is_over_goes_and_that_of_one_that_is_left_stays(
    one: Handover, two: Handover, bus: Bus
) -> None:
    track = await followed(one, Call())
    track.end()
    await one.flush()
    assert await one.find(PLACE) == [] and one._logs == {}
    left = Call()
    left.sample(1)
    track = await followed(one, left)
    await one.leave()
    track.end()
    await one.close()
    found = await logged(two)
    assert found.turn.ids == [1] and two.can_take_over(found)


@pytest.mark.parametrize("other", [False, True])
async def test_experts_that_a_run_reported_are_left_to_others(
    one: Handover, two: Handover, other: bool
) -> None:
    """Also those that arrive after the tokens, when the run is ended; none if the retry has another prompt."""
    call = Call()
    call.turn.routes = TurnRoutes(ROUTERS, len(PROMPT), first=1)
    track = await followed(one, call)
    call.sample(1, 2)
    track.mark_dirty()
    await one.leave()
    rows = np.asarray([[[1, 0]], [[2, 0]], [[3, 0]]])
    call.turn.end_run(None, rows)
    track.end()
    await one.close()
    prompt = PROMPT + other
    new = generation.Call("new", prompt, DETAILS.used, routers=ROUTERS, routes_from=1)
    routes = new.resumed(await logged(two)).turn.routes
    assert routes is not None
    found = routes.packed(0, 5)
    if other:
        assert (routes.next, found) == (0, None)
    else:
        assert found is not None and found == call.turn.routes.packed(0, 5)
        assert (routes.next, found.raw()[1:4].tolist()) == (4, rows.tolist())


async def test_the_log_of_a_call_without_new_tokens_is_kept(one: Handover, bus: Bus) -> None:
    track = await followed(one, Call())
    bus.now = 50.0
    track.written_at -= 50.0
    await one._beat()
    await one.flush()
    bus.now = 100.0
    assert (await logged(one)).log.call == "call"


async def test_new_tokens_are_logged_and_shown_without_waiting_for_the_next_beat(
    monkeypatch: pytest.MonkeyPatch, one: Handover
) -> None:
    monkeypatch.setattr(one, "_beat", AsyncMock())
    call, track = await begun(one)
    call.sample(1)
    track.mark_dirty()
    await until(lambda: call.shown == 1, "the token is shown")


async def test_a_process_without_calls_stays_alive(monkeypatch: pytest.MonkeyPatch, bus: Bus) -> None:
    monkeypatch.setattr("gateway.generation.handover._BEAT_S", 0.01)
    one = Handover(bus, Process("one", "http://one"), SETTINGS)
    await one.start()
    for bus.now in (50.0, 100.0, 150.0):
        count = bus.announced
        await until(lambda count=count: bus.announced > count, "it announces itself")  # type: ignore[misc]
    assert await bus.address_of("one") == "http://one"
    await one.close()


async def test_other_processes_know_how_long_ago_a_refused_request_came(one: Handover, two: Handover) -> None:
    before = time.monotonic()
    one.expect(PLACE, "namebody", "refused", before - 30)
    after = time.monotonic()
    await until(lambda: not one.announcing, "it is announced")
    found = await logged(two)
    assert found.refused
    assert 30 <= found.age_s <= 30 + after - before
