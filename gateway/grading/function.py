"""A Python function as a grader, in worker processes.

Owns the processes. Invariants: a worker grades one episode at a time; one that took too long, died or wrote anything unexpected
is replaced at the next episode, so a response never counts for another episode.
"""

from __future__ import annotations

import asyncio
import sys

import orjson

from gateway.grading.base import GradedEpisode, GradingFailed, Score, score_of
from headgate.processes.lines import LineWorker, WorkerFailed

_START_S = 300.0
"""A function may import large packages, and all workers may start together."""


class FunctionGrader:
    """`function` (`module:function`) in up to `workers` processes; a try takes at most `timeout_s` seconds."""

    def __init__(self, function: str, workers: int, timeout_s: float) -> None:
        argv = [sys.executable, "-u", "-m", "gateway.grading.worker", function]
        self._function = function
        self._timeout_s = timeout_s
        self._workers = [LineWorker(argv, f"a worker of {function}") for _ in range(workers)]
        self._idle: asyncio.LifoQueue[LineWorker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def check(self) -> None:
        """Start one worker. Raise GradingFailed if the function cannot be imported."""
        worker = await self._idle.get()
        try:
            await self._start(worker)
        finally:
            self._idle.put_nowait(worker)

    async def grade(self, episode: GradedEpisode) -> Score:
        question = orjson.dumps(episode)
        worker = await self._idle.get()
        try:
            if not worker.running:
                await self._start(worker)
            async with asyncio.timeout(self._timeout_s):
                score = await worker.ask(question)
        except TimeoutError as error:
            raise GradingFailed(f"{self._function} was not done within {self._timeout_s:g} s") from error
        except WorkerFailed as error:
            raise GradingFailed(str(error)) from error
        finally:
            self._idle.put_nowait(worker)
        if "error" in score:
            raise GradingFailed(f"{self._function} raised:\n{score['error']}")
        try:
            return score_of(score)
        except ValueError as error:
            raise GradingFailed(f"{self._function}: {error}") from error

    async def close(self) -> None:
        """Kill the workers."""
        await asyncio.gather(*(worker.end() for worker in self._workers))

    async def _start(self, worker: LineWorker) -> None:
        try:
            async with asyncio.timeout(_START_S):
                await worker.start()
                message = await worker.listen()
        except TimeoutError as error:
            raise GradingFailed(f"{self._function} was not imported within {_START_S:g} s") from error
        except WorkerFailed as error:
            raise GradingFailed(str(error)) from error
        if message != {"ready": True}:
            await worker.end()
            raise GradingFailed(f"{self._function} cannot be imported:\n{message.get('error', message)}")
