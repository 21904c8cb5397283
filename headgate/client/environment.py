"""A third-party environment as an agent of the driver: it lives in a process of its own, with many concurrent episodes.

Owns that process (`headgate.environments.worker`). Invariants: a process that ended fails the episodes that were played in it,
and is started again by the next; a response never counts for another question.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import headgate
import headgate.processes
from headgate.client.agents import (
    AgentCrashed,
    Reward,
    Task,
    overrun,
    reward_of,
)
from headgate.environments import parse
from headgate.environments.base import Split
from headgate.processes.lines import LineWorker, WorkerFailed

_START_S = 600.0
"""An environment may read a large dataset, and install its tools."""
_BOOT = """
import sys, types
sys.modules["headgate"] = package = types.ModuleType("headgate")
package.__path__ = [sys.argv[1]]
from headgate.environments.worker import main
sys.exit(main(sys.argv[2:]))
"""
"""Any Python runs the worker: it finds this package by its folder, and nothing else of headgate's environment."""


class EnvironmentAgent:
    """The environment `KIND:NAME`, with `args`, in the Python `python`; an episode takes at most `timeout_s` seconds."""

    def __init__(
        self,
        environment: str,
        args: dict[str, Any] | None = None,
        python: str | Path | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Raise ValueError if there is no such kind of environment."""
        parse(environment)
        argv = [
            str(python or sys.executable),
            "-u",
            "-c",
            _BOOT,
            str(Path(next(iter(headgate.__path__)))),
            environment,
            json.dumps(args or {}),
        ]
        self._name = environment
        self._timeout_s = timeout_s
        self._worker = LineWorker(argv, f"the process of {environment}")
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        """Replies to the pending requests; `{}`: the process ended."""
        self._ended = ""
        """The last words of the process, once it has ended."""

    async def tasks(self, split: Split, limit: int | None = None) -> list[Task]:
        """Return the tasks of a split, at most `limit`. Raise ValueError if the environment cannot be loaded, or has none."""
        wanted = {"split": split, "limit": limit}
        try:
            found = [
                response["task"] async for response in self._ask({"tasks": wanted}) if "task" in response
            ]
        except AgentCrashed as error:
            raise ValueError(str(error)) from error
        if not found:
            raise ValueError(f"{self._name} has no task of the split {split!r}")
        return [Task(task["task_id"], task) for task in found]

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward | None:
        question = {"play": task.data, "base_url": base_url, "api_key": api_key}
        try:
            async with asyncio.timeout(self._timeout_s):
                async for response in self._ask(question):
                    return reward_of({key: value for key, value in response.items() if key != "id"})
        except TimeoutError as error:
            raise overrun(f"play an episode of {self._name}", self._timeout_s) from error
        raise AgentCrashed(f"{self._name} did not respond")

    async def close(self) -> None:
        """Kill the process."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        await self._worker.end()

    async def _ask(self, question: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the responses to a question, up to its end. Raise AgentCrashed; who stops listening cancels the question."""
        await self._start()
        number = next(self._numbers)
        responses = self._pending[number] = asyncio.Queue()
        response: dict[str, Any] = {}
        try:
            await self._worker.send(json.dumps({"id": number, **question}).encode())
            while True:
                response = await responses.get()
                if not response:
                    raise AgentCrashed(self._ended, "environment_failed")
                if "error" in response:
                    raise AgentCrashed(str(response["error"]), response.get("reason", "environment_failed"))
                if "end" in response:
                    return
                yield response
        finally:
            del self._pending[number]
            if self._worker.running and not {"error", "end", "reward"} & response.keys():
                await self._worker.send(json.dumps({"id": number, "cancel": True}).encode())

    async def _start(self) -> None:
        async with self._starting:
            if self._worker.running:
                return
            try:
                async with asyncio.timeout(_START_S):
                    await self._worker.start()
                    message = await self._worker.listen()
            except TimeoutError as error:
                raise AgentCrashed(
                    f"{self._name} was not loaded within {_START_S:g} s", "environment_failed"
                ) from error
            except WorkerFailed as error:
                raise AgentCrashed(str(error), "environment_failed") from error
            if "error" in message:
                await self._worker.end()
                raise AgentCrashed(
                    f"{self._name} cannot be loaded:\n{message['error']}", "environment_failed"
                )
            self._reading = asyncio.create_task(self._read(), name="environment-answers")

    async def _read(self) -> None:
        """Deliver every reply to its request; ends with the process."""
        try:
            while True:
                response = await self._worker.listen()
                if (pending := self._pending.get(response.get("id", 0))) is not None:
                    pending.put_nowait(response)
        except WorkerFailed as error:
            self._ended = str(error)
        finally:
            for pending in self._pending.values():
                pending.put_nowait({})
