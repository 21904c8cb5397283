"""A runtime that runs heavy reactions of one level in several threads; decisions and recordings are those of one thread.

Reactions of one level share nothing, by the declarations. A context keeps what its reaction writes, so the runtime applies it in
the order of declaration once the level has run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue

from scheduler.reactor import Clock, Context, Program, Runtime
from scheduler.reactor.elements import Reaction
from scheduler.reactor.recording import Recorder

Job = Callable[[], None]


class ThreadedRuntime(Runtime):
    """`workers` threads run the `parallel` reactions of a level, beside the thread that calls `step`."""

    def __init__(
        self,
        program: Program,
        clock: Clock,
        recording: Recorder | None,
        workers: int,
        parallel: Collection[Reaction],
    ) -> None:
        super().__init__(program, clock, recording)
        self._parallel = frozenset(parallel)
        self._workers = Workers(workers, program.name)

    def close(self) -> None:
        """Ends the threads."""
        self._workers.close()

    def _run_level(self, level: list[Context]) -> None:
        together = [context for context in level if context.reaction in self._parallel]
        if len(together) < 2:
            super()._run_level(level)
            return
        level.sort(key=lambda context: context.order)
        for context in level:
            if context.reaction not in self._parallel:
                context.run()
        self._workers.run([context.run for context in together])
        for context in level:
            self._apply(context)
        level.clear()


class Workers:
    """Threads that wait for jobs and take them one by one from a shared list; they do not keep the process alive.

    A thread takes the next job by adding one to a counter, which `itertools.count` does in one step of the interpreter: there is
    no other lock between them. Whoever finishes the last job lets the giver of the list go on.
    """

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
