"""Broadcast and gather: every actor gets the same array of float64 and answers with a copy (the paper's first workload).

The array has the round's number in its first and last item, so that an old answer cannot pass for a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.reactor_sides import CPUS, Headgate, Hub, Large, Ring, Side
from scheduler.reactor import Context, Reactor

Checks = tuple[float, float, int]
"""Sums of the first items and of the last, and the bytes of all answers."""


class _Tally:
    """Counts the results of rounds, on every side."""

    def __init__(self, items: int) -> None:
        self.array = np.arange(items, dtype=np.float64)
        self.round = 0
        self._first = self._last = 0.0
        self._bytes = 0

    def begin(self) -> np.ndarray:
        """The next round's array; the last round's is not needed any more."""
        self.round += 1
        self.array[0] = self.array[-1] = self.round
        return self.array

    def end(self, answers: list[np.ndarray]) -> None:
        """Takes a round's answers."""
        for answer in answers:
            self._first += float(answer[0])
            self._last += float(answer[-1])
            self._bytes += answer.nbytes

    def result(self) -> Checks:
        """Returns the results of the rounds since the last call."""
        told = (self._first, self._last, self._bytes)
        self._first, self._last, self._bytes = 0.0, 0.0, 0
        return told


class _Copier(Reactor):
    """Copies into a buffer of its own."""

    def __init__(self, index: int, buffer: np.ndarray) -> None:
        super().__init__(f"actor{index}")
        self._buffer = buffer
        self.heard = self.input("heard", Large)
        self.answer = self.output("answer", Large)
        self.copying = self.reaction(self._copy, on=[self.heard], writes=[self.answer])

    def _copy(self, now: Context) -> None:
        np.copyto(self._buffer, now[self.heard].array)
        now.set(self.answer, Large.of(self._buffer))


class _Pool:
    """A bare thread pool that copies into the same buffers: the floor."""

    def __init__(self, items: int, buffers: list[np.ndarray]) -> None:
        self._tally, self._buffers = _Tally(items), buffers
        self._pool = ThreadPoolExecutor(CPUS)

    def _copy(self, buffer: np.ndarray) -> np.ndarray:
        np.copyto(buffer, self._tally.array)
        return buffer

    def play(self, rounds: int) -> Checks:
        for _ in range(rounds):
            self._tally.begin()
            self._tally.end(list(self._pool.map(self._copy, self._buffers)))
        return self._tally.result()

    def close(self) -> None:
        self._pool.shutdown()


class _Ray:
    """Actors that get a reference to the array in Ray's store, and return it: Ray makes the copy."""

    def __init__(self, items: int, actors: int) -> None:
        import ray

        class Actor:
            def answer(self, array: np.ndarray) -> np.ndarray:
                return array

        remote = ray.remote(Actor)
        self._ray, self._tally = ray, _Tally(items)
        self._actors = [remote.remote() for _ in range(actors)]

    def play(self, rounds: int) -> Checks:
        ray = self._ray
        for _ in range(rounds):
            sent = ray.put(self._tally.begin())
            self._tally.end(ray.get([actor.answer.remote(sent) for actor in self._actors]))
        return self._tally.result()

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def sides(mb: float, actors: int, ray: bool) -> dict[str, Callable[[], Side]]:
    """`mb`: MiB of an array. The pool and the program share their buffers, to need less memory."""
    items = int(mb * 1024 * 1024) // 8
    buffers = [np.zeros(items) for _ in range(actors)]

    def headgate() -> Side:
        hub = Hub(_Tally(items), actors, Large, Large, tuple[float, float, int])
        copiers = [_Copier(index, buffer) for index, buffer in enumerate(buffers)]
        parallel = [copier.copying for copier in copiers]
        return Headgate(Ring("broadcast", hub, copiers), hub, workers=CPUS - 1, parallel=parallel)

    made: dict[str, Callable[[], Side]] = {"headgate": headgate, "floor": lambda: _Pool(items, buffers)}
    if ray:
        made["ray"] = lambda: _Ray(items, actors)
    return made
