"""A program on the wall clock, in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from scheduler.reactor import MILLISECOND, Context, Program, Reactor, Runtime, Tag, WallClock, drive
from tests.harness.waiting import result_of, turns, within


class Echo(Reactor):
    """Sends what it receives, immediately and again after a delay."""

    def __init__(self, delay: int) -> None:
        super().__init__("echo")
        self.delay = delay
        self.received = self.physical("received", str)
        self.later = self.logical("later", str)
        self.repeated = self.output("repeated", str)
        self.reaction(self._on_received, on=[self.received], writes=[self.repeated, self.later])
        self.reaction(self._on_later, on=[self.later], writes=[self.repeated])

    def _on_received(self, now: Context) -> None:
        if now[self.received] == "bad":
            raise ZeroDivisionError
        now.schedule(self.later, now[self.received] + "!", after=self.delay)
        now.set(self.repeated, now[self.received])

    def _on_later(self, now: Context) -> None:
        now.set(self.repeated, now[self.later])


class Outputs:
    """Recorded outputs, and a way to wait for them."""

    def __init__(self) -> None:
        self.all: list[tuple[Tag, str]] = []
        self._more = asyncio.Event()

    def add(self, tag: Tag, word: str) -> None:
        self.all.append((tag, word))
        self._more.set()

    async def until(self, count: int) -> list[str]:
        async with within(f"{count} events are there"):
            while len(self.all) < count:
                self._more.clear()
                await self._more.wait()
        return [word for _, word in self.all]


@contextlib.asynccontextmanager
async def driven(delay: int) -> AsyncIterator[tuple[Echo, Runtime, Outputs, asyncio.Task[None]]]:
    echo, outputs = Echo(delay), Outputs()
    runtime = Runtime(Program("p", [echo]).seal(), WallClock())
    runtime.observe(echo.repeated, outputs.add)
    runtime.start()
    task = asyncio.create_task(drive(runtime))
    try:
        yield echo, runtime, outputs, task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_an_injection_wakes_it_and_so_does_time() -> None:
    async with driven(20 * MILLISECOND) as (echo, runtime, outputs, task):
        await turns()
        runtime.inject(echo.received, "a")
        assert await outputs.until(2) == ["a", "a!"]
        (first, _), (second, _) = outputs.all
        assert second.time == first.time + 20 * MILLISECOND
        runtime.inject(echo.received, "b")
        assert await outputs.until(4) == ["a", "a!", "b", "b!"]
        assert not task.done()


async def test_what_is_decided_immediately_wakes_its_driver_for_nothing_but_an_earlier_time() -> None:
    async with driven(20 * MILLISECOND) as (echo, runtime, outputs, _):
        await turns()
        wake, woken = runtime.wake, []
        runtime.wake = lambda: (woken.append(runtime.tag), wake())[1]
        runtime.inject_now(echo.received, "a")
        assert [word for _, word in outputs.all] == ["a"]
        runtime.inject_now(echo.received, "b")
        assert woken == [outputs.all[0][0]], "what the second leaves is due after what the driver waits for"
        assert await outputs.until(4) == ["a", "b", "a!", "b!"]


async def test_what_is_injected_while_it_waits_for_a_timer_does_not_wait() -> None:
    async with driven(3600 * 1000 * MILLISECOND) as (echo, runtime, outputs, _):
        runtime.inject(echo.received, "a")
        assert await outputs.until(1) == ["a"]
        assert runtime.next_time() is not None
        await turns()
        runtime.inject(echo.received, "b")
        assert await outputs.until(2) == ["a", "b"]


async def test_an_exception_comes_out_and_names_the_reaction() -> None:
    async with driven(0) as (echo, runtime, _, task):
        runtime.inject(echo.received, "bad")
        with pytest.raises(ZeroDivisionError) as raised:
            await result_of(task, "the program ends")
        assert any("in reaction echo.on_received at" in note for note in raised.value.__notes__)


async def test_a_chain_without_end_leaves_the_loop_its_turn() -> None:
    reactor: Any = Reactor("a")
    again = reactor.logical("again", int)
    event = reactor.physical("event", int)
    body: Callable[[Context], None] = lambda now: now.schedule(again, 1)  # noqa: E731
    reactor.reaction(body, on=[again, event], writes=[again], name="r")
    runtime = Runtime(Program("p", [reactor]).seal(), WallClock())
    runtime.start()
    task = asyncio.create_task(drive(runtime))
    runtime.inject(event, 1)
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runtime.tag.microstep > 0


def test_the_wall_clock_does_not_go_back() -> None:
    clock = WallClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)
