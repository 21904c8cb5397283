"""A fixed set of threads that take jobs from one list, together with the thread that gives it to them.

A worker takes the next job by adding one to a counter; there is no other lock between them. Whoever finishes the last job lets
the giver go on. `itertools.count` counts in one step of the interpreter, which is what makes it fit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Job = Callable[[], None]


class Workers:
    """Threads that wait for jobs. They do not keep the process alive."""

    def __init__(self, count: int, name: str) -> None:
        self._lists: SimpleQueue[_Jobs | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, jobs: Sequence[Job]) -> None:
        """Does all jobs, and returns when the last has ended. They must not raise."""
        if not jobs:
            return
        shared = _Jobs(jobs)
        for _ in range(min(len(self._threads), len(jobs) - 1)):
            self._lists.put(shared)
        shared.work()
        shared.ended.acquire()

    def close(self) -> None:
        """Ends the threads."""
        for _ in self._threads:
            self._lists.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        while (shared := self._lists.get()) is not None:
            shared.work()


class _Jobs:
    """A list of jobs, each taken once."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._taken, self._done = itertools.count(), itertools.count(1)
        self.ended = threading.Lock()
        """Free once the last job has ended."""
        self.ended.acquire()

    def work(self) -> None:
        """Takes jobs until there is none."""
        jobs = self._jobs
        while (index := next(self._taken)) < len(jobs):
            jobs[index]()
            if next(self._done) == len(jobs):
                self.ended.release()
