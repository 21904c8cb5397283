"""What an agent is to the driver: something that is given a task, a base URL and a key, and comes back with a reward.

Three kinds, one Protocol (`Agent`):
- `CommandAgent`: any command, once per episode;
- `FunctionAgent`: an async `module:function`, in this process;
- `WorkerAgent`: a long-lived command that reads tasks and writes rewards, one JSON object a line.

Owns the processes of the agents. Invariants: each leads a process group of its own, and when a call ends, however it ends,
nothing of the group is left (of a worker: unless it answered and waits for its next task); output that is kept is bounded;
a reward is a finite number.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

_TAIL_BYTES = 64 * 1024
_LINE_BYTES = 1024 * 1024
_QUOTED_LINES = 15
_DRAIN_S = 1.0


class AgentCrashed(Exception):
    """An agent ended without a usable reward; the message quotes its last lines."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `data` is the agent's business; it holds `task_id` too if the task came from a file."""

    task_id: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reward:
    """How well an episode went, and what the number is made of."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)


class Agent(Protocol):
    """Solves a task with the model at `base_url` (an OpenAI base URL), with `api_key` as the key of this one episode.

    Any exception counts as a crash of this episode. Cancelling a call ends all that it started.
    """

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward: ...

    async def close(self) -> None:
        """Ends whatever outlives a call."""
        ...


def read_tasks(path: str | Path) -> list[Task]:
    """Tasks from a file with one JSON object a line, each with a `task_id` of its own. Empty lines are skipped.

    Raises ValueError, naming file and line, on anything else.
    """
    tasks: dict[str, Task] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = _task(json.loads(line))
            if task.task_id in tasks:
                raise ValueError(f"task_id {task.task_id!r} was used before")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        tasks[task.task_id] = task
    return list(tasks.values())


def _task(value: Any) -> Task:
    if not isinstance(value, dict) or not isinstance(value.get("task_id"), str) or not value["task_id"]:
        raise ValueError('a task is an object with a "task_id" that is a string')
    return Task(value["task_id"], value)


def reward_of(value: Any) -> Reward:
    """A number, or an object with `reward` and perhaps `components`, as a Reward. Raises AgentCrashed on anything else."""
    fields = value if isinstance(value, dict) else {"reward": value}
    components = fields.get("components") or {}
    if "reward" not in fields or not isinstance(components, dict):
        raise AgentCrashed(f'not a reward (a number or an object with "reward"): {str(value)[:200]}')
    return Reward(_finite(fields["reward"]), {str(name): _finite(x) for name, x in components.items()})


def _finite(value: Any) -> float:
    if isinstance(value, str):
        raise AgentCrashed(f"a reward is a number, not the string {value[:200]!r}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise AgentCrashed(f"a reward is a number, not {str(value)[:200]}") from error
    if not math.isfinite(number):
        raise AgentCrashed(f"a reward is a finite number, not {number}")
    return number


# An async function


class FunctionAgent:
    """`async def solve(task: dict, base_url: str, api_key: str)` that answers a number or a dict with `reward`."""

    def __init__(self, function: Callable[[dict[str, Any], str, str], Awaitable[Any]]) -> None:
        self._function = function

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward:
        return reward_of(await self._function(task.data, base_url, api_key))

    async def close(self) -> None:
        """Nothing outlives a call."""


def load_agent(name: str) -> FunctionAgent:
    """The agent `module:function`, or `path/to/file.py:function`. Raises ValueError if there is none of that name."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"an agent is named module:function or file.py:function, not {name!r}")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    function = getattr(module, attribute, None)
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{name}: there is no async function {attribute} in {place}")
    return FunctionAgent(function)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise ValueError(f"there is no module {name}") from error
        raise


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# A command per episode


class CommandAgent:
    """Runs `argv` once per episode; at most `timeout_s` seconds.

    The command finds OPENAI_BASE_URL, OPENAI_API_KEY and HEADGATE_TASK (the task as JSON) in its environment. Its reward is
    the last line of its output that is not empty, if that is a number or an object with `reward` in JSON; else its exit
    status says it: 0 is 1.0 and 1 is 0.0. Any other status, and a signal, is a crash whatever was printed.
    """

    def __init__(self, argv: Sequence[str], timeout_s: float = 600.0) -> None:
        self._argv = list(argv)
        self._timeout_s = timeout_s

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward:
        env = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "HEADGATE_TASK": json.dumps(task.data),
        }
        # Files, since asyncio waits for the end of a pipe, which a grandchild may hold open.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            status = await self._run(env, output, errors)
            if status not in (0, 1):
                raise AgentCrashed(f"{self._argv[0]} ended with {status}; {_quoted(_end_of(errors))}")
            return _printed_reward(_end_of(output)) or Reward(1.0 - status)

    async def _run(self, env: dict[str, str], output: IO[bytes], errors: IO[bytes]) -> int:
        process = await _start(self._argv, asyncio.subprocess.DEVNULL, output, errors, env)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await process.wait()
        except TimeoutError as error:
            message = f"step 'run the agent's command' was not done within {self._timeout_s:g} s"
            raise AgentCrashed(message) from error
        finally:
            await _kill(process)

    async def close(self) -> None:
        """Nothing outlives a call."""


def _printed_reward(text: str) -> Reward | None:
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return reward_of(value) if number or (isinstance(value, dict) and "reward" in value) else None


# Long-lived workers


class WorkerAgent:
    """`workers` processes of `argv`, each started at its first task and again after it died.

    For each task a worker reads a line `{"task": ..., "base_url": ..., "api_key": ...}` and writes a line
    `{"reward": ..., "components": ...}`, or `{"error": "..."}`, which is a crash that it survives. A worker that ends, takes
    longer than `timeout_s` seconds, writes a line that is no JSON object, or whose call is cancelled, is replaced.
    """

    def __init__(self, argv: Sequence[str], workers: int = 1, timeout_s: float = 600.0) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers")
        self._timeout_s = timeout_s
        self._workers = [_Worker(list(argv)) for _ in range(workers)]
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward:
        question = json.dumps({"task": task.data, "base_url": base_url, "api_key": api_key})
        worker = await self._idle.get()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(question)
        except TimeoutError as error:
            message = f"step 'wait for an agent worker' was not done within {self._timeout_s:g} s"
            raise AgentCrashed(message) from error
        finally:
            self._idle.put_nowait(worker)
        if "error" in answer:
            raise AgentCrashed(f"an agent worker says: {str(answer['error'])[:2000]}")
        return reward_of(answer)

    async def close(self) -> None:
        """Kills the workers."""
        for worker in self._workers:
            await worker.end()


class _Worker:
    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None
        self._errors: _Tail | None = None

    async def ask(self, question: str) -> dict[str, Any]:
        try:
            answer = await self._exchange(question)
        except BaseException:
            # Its answer would be taken for that of the next task.
            await self.end()
            raise
        return answer

    async def _exchange(self, question: str) -> dict[str, Any]:
        process, errors = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(question.encode() + b"\n")
            await process.stdin.drain()
        try:
            line = await process.stdout.readline()
        except ValueError as error:
            raise AgentCrashed("an agent worker wrote a line that is too long") from error
        if not line.endswith(b"\n"):
            await _kill(process)
            said = _quoted(await errors.end())
            raise AgentCrashed(f"an agent worker ended with {process.returncode}; {said}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise AgentCrashed(f"an agent worker wrote no JSON object: {line[:200]!r}")
        return answer

    async def _running(self) -> tuple[asyncio.subprocess.Process, _Tail]:
        if self._process is None or self._errors is None or self._process.returncode is not None:
            await self.end()
            pipe = asyncio.subprocess.PIPE
            self._process = await _start(self._argv, pipe, pipe, pipe)
            assert self._process.stderr is not None
            self._errors = _Tail(self._process.stderr)
        return self._process, self._errors

    async def end(self) -> None:
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is not None and errors is not None:
            await _kill(process)
            await errors.end()


# Processes


class _Tail:
    """The last `_TAIL_BYTES` of a stream, read by a task so that its writer never blocks."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept = bytearray()
        self._task = asyncio.create_task(self._read(stream), name="agent-stderr")

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_TAIL_BYTES):
            self._kept += chunk
            del self._kept[:-_TAIL_BYTES]

    async def end(self) -> str:
        """What was kept, once the writers are dead. One that left the process group is not waited for."""
        await asyncio.wait({self._task}, timeout=_DRAIN_S)
        self._task.cancel()
        return self._kept.decode(errors="replace")


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return file.read().decode(errors="replace")


def _quoted(errors: str) -> str:
    return "stderr:\n" + "\n".join(errors.splitlines()[-_QUOTED_LINES:])


async def _start(
    argv: list[str],
    stdin: int,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    env: dict[str, str] | None = None,
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(env or {})},
            limit=_LINE_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        raise AgentCrashed(f"cannot start {argv[0]}: {error}") from error


async def _kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to the group. Waits for the process, but no longer than `_DRAIN_S` for a pipe that another holds open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _DRAIN_S)
