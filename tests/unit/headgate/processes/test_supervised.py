"""A process that is kept, and ranks that live and die together: with processes that a test ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from headgate.processes import supervised as module
from headgate.processes.errors import GivenUp
from headgate.processes.supervised import Backoff, Budget, Life, ProcessEnded, SupervisedProcess
from scheduler.cluster.errors import NodeLost
from scheduler.cluster.launch import Running
from tests.faults.virtual.clock import Clock, VirtualLoop
from tests.harness.waiting import result_of, within
from tests.unit.scheduler.cluster.processes import Process


class World:
    """Starts gangs of `size`, and remembers them."""

    def __init__(self, size: int = 1) -> None:
        self.gangs: list[list[Process]] = []
        self.reports: list[str] = []
        self.well = True
        self.fails = 0
        self._size = size
        self._started = asyncio.Event()

    async def start(self) -> Sequence[Running]:
        if self.fails:
            self.fails -= 1
            raise NodeLost("its node is gone")
        self.gangs.append([Process(f"p{i}") for i in range(self._size)])
        self._started.set()
        return self.gangs[-1]

    async def gang(self, number: int) -> list[Process]:
        """Once it is started."""
        async with within(f"the process has been started {number + 1} times"):
            while len(self.gangs) <= number:
                self._started.clear()
                await self._started.wait()
        return self.gangs[number]

    def kept(self, restarts: int = 5, **options: float | bool) -> SupervisedProcess:
        async def healthy(_: Running) -> bool:
            return self.well

        return SupervisedProcess(
            "it", self.start, Budget(restarts, 600), self.reports.append, healthy=healthy, **options
        )  # type: ignore[arg-type]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualLoop]:
    """Yield a loop whose seconds take no time; the supervisor has its clock."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    loop = VirtualLoop(clock)
    yield loop
    loop.end()
    assert not loop.failures


async def test_a_process_that_ends_is_restarted_and_one_that_is_cancelled_is_stopped() -> None:
    world = World()
    kept = world.kept()
    task = asyncio.create_task(kept.run())
    (first,) = await world.gang(0)
    first.ended.set_result(ProcessEnded(0, "its last words"))
    (second,) = await world.gang(1)
    assert first.stopped, "whatever it left behind is ended before the next begins"
    assert "ended with 0:\nits last words" in world.reports[0]
    await result_of(kept.up.wait(), "the process is up")
    task.cancel()
    await asyncio.wait({task})
    assert second.stopped
    assert not kept.up.is_set()


async def test_a_replacement_is_not_counted_as_a_restart() -> None:
    world = World(size=2)
    kept = world.kept(restarts=0, may_end=True)
    task = asyncio.create_task(kept.run())
    kept.replace()  # nothing runs yet, so what is started is new
    first = await world.gang(0)
    await result_of(kept.up.wait(), "the processes are up")
    kept.replace()
    second = await world.gang(1)
    assert [one.stopped for one in first] == [True, True]
    assert (kept.restarts, world.reports) == (0, [])
    for one in second:
        one.ended.set_result(ProcessEnded(0, ""))
    await result_of(task, "the processes are kept no more")
    assert len(world.gangs) == 2


async def test_one_rank_that_fails_ends_all_and_all_that_end_well_are_done() -> None:
    world = World(size=2)
    task = asyncio.create_task(world.kept(may_end=True).run())
    first = await world.gang(0)
    first[0].ended.set_result(ProcessEnded(0, ""))
    first[1].ended.set_result(ProcessEnded(1, ""))
    second = await world.gang(1)
    assert [one.stopped for one in first] == [True, True]
    assert "ended with 1 (p1)" in world.reports[0]
    for one in second:
        one.ended.set_result(ProcessEnded(0, ""))
    await result_of(task, "the process is kept no more")
    assert len(world.gangs) == 2


async def test_a_start_that_fails_counts_and_the_budget_ends_it() -> None:
    world = World()
    world.fails = 9
    with pytest.raises(
        GivenUp, match="it is given up after 2 restarts: could not be started: its node is gone"
    ):
        await world.kept(restarts=2).run()
    assert len(world.reports) == 2


async def test_a_program_that_would_fail_again_is_not_started_again() -> None:
    world = World()
    task = asyncio.create_task(world.kept(restarts=5).run())
    (only,) = await world.gang(0)
    only.ended.set_result(ProcessEnded(2, "no such option"))
    with pytest.raises(GivenUp, match="given up after 0 restarts: ended with 2:\nno such option"):
        await result_of(task, "the process is given up")
    assert len(world.gangs) == 1


async def test_silence_is_a_death() -> None:
    world = World()
    world.well = False
    task = asyncio.create_task(world.kept(start_s=0.01, silent_s=600).run())
    await world.gang(1)
    assert "has not responded for 0.01 s since its start" in world.reports[0]
    task.cancel()
    await asyncio.wait({task})


def life(ended_at: float, lived_s: float = 1.0) -> Life:
    return Life("ended with 1", 1, True, ended_at, lived_s)


def test_restarts_wait_longer_each_time_and_the_window_moves_on() -> None:
    budget = Budget(restarts=3, window_s=100)
    assert [budget.after(life(now)) for now in (0, 1, 2)] == [0.2, 0.4, 0.8]
    assert budget.after(life(100)) is None
    assert budget.after(life(100.5)) is not None, "the first is out of the window"
    many = Budget(restarts=50, window_s=1e9)
    assert max(many.after(life(now)) or 0 for now in range(50)) == 10.0


def test_a_short_life_is_followed_by_a_longer_wait_and_a_long_one_is_not() -> None:
    backoff = Backoff()
    waits = [backoff.after(life(now)) for now in range(8)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.after(life(100, lived_s=60.0)) == 0.2
    assert backoff.after(life(101)) == 0.4


def test_a_silent_process_gets_less_time_to_end_than_one_that_is_stopped(loop: VirtualLoop) -> None:
    world = World()
    task = loop.create_task(world.kept(silent_s=30, stop_s=60, silent_stop_s=1).run())
    loop.settle()
    world.well = False
    loop.advance(40)
    world.well = True
    loop.settle()
    task.cancel()
    loop.settle()
    assert [one.grace_s for (one,) in world.gangs] == [1, 60]


def test_silence_counts_from_the_last_response(loop: VirtualLoop) -> None:
    world = World()
    loop.create_task(world.kept(start_s=5, silent_s=30).run())
    loop.advance(300)
    assert len(world.gangs) == 1, "it answers, and is left alone"
    world.well = False
    loop.advance(28)
    assert world.reports == []
    loop.advance(5)
    assert world.reports[0].startswith("it has not responded for 30 s\n")
    assert world.gangs[0][0].stopped


def test_a_process_without_a_check_is_up_once_it_is_started(loop: VirtualLoop) -> None:
    world = World()
    kept = SupervisedProcess("it", world.start, Budget(5, 600), world.reports.append, start_s=5, silent_s=5)
    loop.create_task(kept.run())
    loop.settle()
    assert kept.up.is_set()
    loop.advance(100)
    assert len(world.gangs) == 1
    assert world.reports == []


def test_a_program_that_is_not_there_is_tried_again_later_and_later(loop: VirtualLoop) -> None:
    """Nothing counts as running in the meantime."""
    world, began = World(), loop.time()
    tried: list[tuple[float, int]] = []

    async def start() -> Sequence[Running]:
        tried.append((round(loop.time() - began, 3), len(kept.running)))
        if len(tried) == 1:
            return await world.start()
        raise FileNotFoundError(2, "No such file or directory", "vllm")

    kept = SupervisedProcess("it", start, Budget(3, 600), world.reports.append)
    task = loop.create_task(kept.run())
    loop.settle()
    assert len(kept.running) == 1
    world.gangs[0][0].ended.set_result(ProcessEnded(1, ""))
    loop.advance(60)
    assert tried == [(0.0, 0), (0.2, 0), (0.6, 0), (1.4, 0)]
    with pytest.raises(GivenUp, match=r"given up after 3 restarts: could not be started: .*vllm"):
        task.result()
