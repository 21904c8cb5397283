"""Reactions of one level in several threads: decisions and recordings do not depend on it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.reactor_threads import ThreadedRuntime, Workers
from scheduler.reactor import Context, Program, Reactor, Recording, Runtime, VirtualClock, replay

COUNT = 12
Heavy = Callable[[int, int], None]


class Half(Reactor):
    """Halves what it hears, says so now and once more later; every third is no heavy one."""

    def __init__(self, index: int, heavy: Heavy) -> None:
        super().__init__(f"half{index}")
        self.index, self.heavy = index, heavy
        self.heard = self.input("heard", int)
        self.again = self.logical("again", int)
        self.said = self.output("said", int)
        self.halving = self.reaction(
            self._on_heard, on=[self.heard, self.again], writes=[self.said, self.again]
        )

    def _on_heard(self, now: Context) -> None:
        value = now.get(self.heard) or now.get(self.again) or 0
        self.heavy(self.index, value)
        now.set(self.said, value // 2 + self.index, why=f"half of {value}")
        if value > 40 + self.index:
            now.schedule(self.again, value // 2, after=self.index % 4)


class Hub(Reactor):
    """Tells all of them what comes, and their sum."""

    def __init__(self) -> None:
        super().__init__("hub")
        self.event = self.physical("event", int)
        self.told = self.output("told", int)
        self.sum = self.output("sum", int)
        self.inputs = [self.input(f"in{index}", int) for index in range(COUNT)]
        self.reaction(
            lambda now: now.set(self.told, now[self.event]), on=[self.event], writes=[self.told], name="tell"
        )
        self.reaction(self._total, on=self.inputs, writes=[self.sum])

    def _total(self, now: Context) -> None:
        now.set(self.sum, sum(now.get(port) or 0 for port in self.inputs))


def program(heavy: Heavy) -> tuple[Program, Hub, list[Half]]:
    """A hub and the others around it, with and without delays."""
    hub, halves = Hub(), [Half(index, heavy) for index in range(COUNT)]
    built = Program("halves", [hub, *reversed(halves)])
    for index, half in enumerate(halves):
        built.connect(hub.told, half.heard)
        built.connect(half.said, hub.inputs[index], after=(None, 0, 3)[index % 3])
    return built.seal(), hub, halves


def nap(_index: int, _value: int) -> None:
    time.sleep(random.random() / 500)


def perform(path: Path, workers: int, heavy: Heavy = nap) -> tuple[bytes, list[int]]:
    """The recording of a run, and what its observer saw; with no workers, on the kernel's own runtime."""
    built, hub, halves = program(heavy)
    recording, clock, seen = Recording.open(path, {}), VirtualClock(), []
    parallel = [half.halving for half in halves if half.index % 3]
    threads = ThreadedRuntime(built, clock, recording, workers, parallel) if workers else None
    runtime = threads or Runtime(built, clock, recording)
    runtime.observe(hub.sum, lambda _, value: seen.append(value))
    runtime.start()
    try:
        runtime.inject(hub.event, 1000)
        for number in range(8):
            runtime.inject(hub.event, 77 * number)
            runtime.run_until(clock.now() + number % 3)
        runtime.run_until(clock.now() + 300)
    finally:
        if threads is not None:
            threads.close()
        recording.close()
    return path.read_bytes(), seen


def test_the_recording_is_the_same_whatever_the_threads_do(tmp_path: Path) -> None:
    alone = perform(tmp_path / "0", 0)
    assert alone[0].count(b'"port"') > 150
    for workers in (2, 8):
        for run in range(3):
            assert perform(tmp_path / f"{workers}-{run}", workers) == alone
    report = replay(tmp_path / "8-0", lambda _: program(lambda *_: None)[0])
    assert report.equal


@pytest.mark.parametrize("workers", [0, 2, 8])
def test_the_first_failure_by_declaration_ends_the_run(tmp_path: Path, workers: int) -> None:
    """Reactions declared after the first failing one may have run, but have no effect."""

    def heavy(index: int, value: int) -> None:
        nap(index, value)
        if value == 77 and index in (4, 7):
            raise ZeroDivisionError(index)

    with pytest.raises(ZeroDivisionError) as raised:
        perform(tmp_path / "r", workers, heavy)
    assert raised.value.args == (7,)  # declared in reverse
    lines = (tmp_path / "r").read_bytes().splitlines()
    assert b'"failed":"half7.on_heard"' in lines[-2]
    assert b"half8.said" in lines[-3]
    assert lines[1:] == _without_workers(tmp_path, heavy)


def _without_workers(folder: Path, heavy: Heavy) -> list[bytes]:
    with pytest.raises(ZeroDivisionError):
        perform(folder / "alone", 0, heavy)
    return (folder / "alone").read_bytes().splitlines()[1:]


def test_they_run_beside_each_other_and_the_caller_is_one_of_them() -> None:
    """Three at once, or the barrier breaks; and the two that wait here hold nobody else up."""
    workers, barrier, threads = Workers(2, "w"), threading.Barrier(3), []

    def job() -> None:
        barrier.wait(timeout=60)
        threads.append(threading.current_thread())

    try:
        workers.run([job] * 6)
        assert len(threads) == 6
        assert len(set(threads)) <= 3
        workers.run([])
        workers.run([lambda: threads.clear()])
        assert not threads
    finally:
        before = [t for t in threading.enumerate() if t.name.startswith("w-")]
        workers.close()
    assert len(before) == 2
    assert not any(thread.is_alive() for thread in before)
