"""Agents as the driver runs them: each gets a task, a base URL and a key, and returns a reward.

Three kinds, one Protocol (`Agent`):
- `CommandAgent`: any command, once per episode;
- `FunctionAgent`: an async `module:function`, in this process;
- `WorkerAgent`: a long-lived command that reads tasks and writes rewards, one JSON object a line.

An agent whose episodes are graded by the gateway (`[graders]`) comes back with None.

Owns the processes of the agents. Invariants: each leads a process group of its own, and when a call ends, however it ends,
nothing of the group is left (of a worker: unless it responded and waits for its next task); output that is kept is bounded;
a reward is a finite number.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

from headgate.client.command_runner import (
    CommandRunner,
    HostRunner,
    Killed,
)
from headgate.client.foreign import Overran, run_foreign
from headgate.json_depth import loads
from headgate.processes.lines import (
    TAIL_BYTES,
    LineWorker,
    WorkerFailed,
    quoted,
)
from headgate.rewards import number

AGENT_FAILED = "agent_failed"
TIME_LIMIT = "time_limit"
_REASON_LENGTH = 255


class AgentCrashed(Exception):
    """An agent ended without a usable reward; the message quotes its last lines.

    `reason`: a word for why its episode is left out of training, such as `tool_failed`.
    """

    def __init__(self, message: str, reason: str = AGENT_FAILED) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `data` is the agent's business; it holds `task_id` too if the task came from a file."""

    task_id: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of an episode, and its components."""

    reward: float
    """The whole, what single calls earned included."""
    components: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    """The part of the reward that single calls earned, by the id of their reply."""


class Agent(Protocol):
    """Solves a task with the model at `base_url` (an OpenAI base URL), with `api_key` as the key of this one episode.

    Return a reward, or None: the gateway's graders compute it. Any exception counts as a crash of this episode. Cancelling a
    call ends all that it started.
    """

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward | None: ...

    async def close(self) -> None:
        """End whatever outlives a call."""
        ...


def read_tasks(path: str | Path) -> list[Task]:
    """Return tasks from a file with one JSON object a line, each with a `task_id` of its own. Empty lines are skipped.

    Raise ValueError, naming file and line, on anything else.
    """
    tasks: dict[str, Task] = {}
    for at, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = _task(_object(line))
            if task.task_id in tasks:
                raise ValueError(f"task_id {task.task_id!r} was used before")
        except ValueError as error:
            raise ValueError(f"{path}, line {at}: {error}") from error
        tasks[task.task_id] = task
    return list(tasks.values())


def _object(line: str) -> Any:
    try:
        return loads(line)
    except json.JSONDecodeError as error:
        near = line[max(0, error.pos - 20) : error.pos + 20]
        raise ValueError(f"not JSON at column {error.colno}, near {near!r}: {error.msg}") from error


def _task(value: Any) -> Task:
    if isinstance(value, list):
        raise ValueError(
            "one object a line is needed, not a list: `jq -c '.[]' FILE > tasks.jsonl` converts a list"
        )
    if not isinstance(value, dict) or not isinstance(value.get("task_id"), str) or not value["task_id"]:
        raise ValueError('a task is an object with a "task_id" that is a string')
    return Task(value["task_id"], value)


def reward_of(value: Any) -> Reward | None:
    """Return a number, or an object with `reward` (and `components`, `calls`), as a Reward; None, or `{"reward": None}`, as None.

    Raise AgentCrashed on anything else.
    """
    fields = value if isinstance(value, dict) else {"reward": value}
    if fields == {"reward": None}:
        return None
    named = [fields.get(name) or {} for name in ("components", "calls")]
    if "reward" not in fields or not all(isinstance(numbers, dict) for numbers in named):
        raise AgentCrashed(f'not a reward (a number or an object with "reward"): {str(value)[:200]}')
    components, calls = ({str(name): _stated(x) for name, x in numbers.items()} for numbers in named)
    return Reward(_stated(fields["reward"]), components, calls)


def _stated(value: Any) -> float:
    try:
        return number(value)
    except ValueError as error:
        raise AgentCrashed(str(error)) from error


def _crash_of(response: dict[str, Any], who: str) -> AgentCrashed:
    """Return the error of an agent that reports `{"error": "...", "reason": "..."}`."""
    reason = str(response.get("reason") or AGENT_FAILED)[:_REASON_LENGTH]
    return AgentCrashed(f"{who}: {str(response['error'])[:2000]}", reason)


def overrun(step: str, limit_s: float, stderr: str = "") -> AgentCrashed:
    """Return the error of an agent that took longer than it may; `stderr`: its last lines (`quoted`)."""
    limit = "the limit is --timeout of the driver, or [rollout] timeout_s of the trainer"
    return AgentCrashed(f"step '{step}' was not done within {limit_s:g} s ({limit}){stderr}", TIME_LIMIT)


# An async function


class FunctionAgent:
    """`async def solve(task: dict, base_url: str, api_key: str)` that returns a number, a dict with `reward`, or None.

    A call takes at most `timeout_s` seconds. When it fails, the tasks that it started are cancelled.
    """

    def __init__(
        self, function: Callable[[dict[str, Any], str, str], Awaitable[Any]], timeout_s: float = 600.0
    ) -> None:
        self._function = function
        self._timeout_s = timeout_s

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward | None:
        work = partial(self._function, task.data, base_url, api_key)
        try:
            response = await run_foreign(work, "agent-function", limit_s=self._timeout_s, children=True)
        except Overran as error:
            raise overrun("run the agent function", self._timeout_s) from error
        return reward_of(response)

    async def close(self) -> None:
        """Nothing outlives a call."""


def load_agent(name: str, timeout_s: float = 600.0) -> FunctionAgent:
    """Return the agent `module:function`, or `path/to/file.py:function`. Raise ValueError if there is none of that name."""
    return FunctionAgent(function_named(name), timeout_s)


def function_named(name: str) -> Callable[..., Awaitable[Any]]:
    """Return the async function `module:function`, or `path/to/file.py:function`. Raise ValueError if there is none of that
    name."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"an agent is named module:function or file.py:function, not {name!r}")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    function = getattr(module, attribute, None)
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{name}: there is no async function {attribute} in {place}")
    found: Callable[..., Awaitable[Any]] = function
    return found


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

    The command finds OPENAI_BASE_URL, OPENAI_API_KEY, the same two for Anthropic's clients (ANTHROPIC_BASE_URL is without
    `/v1`) and HEADGATE_TASK (the task as JSON) in its environment. Its reward is the last line of its output that is not
    empty: a number, or an object with `reward` in JSON. `{"error": "...", "reason": "tool_failed"}` there, a line that is none
    of these, no output, an exit status other than 0, and a signal are crashes: a program that broke did not earn 0.

    With `grade` its output is not a reward: the gateway's graders compute it. With `exit_code_reward` the exit status is the
    reward where no number is printed, 0 as 1.0 and 1 as 0.0; other statuses are crashes. `runner`: runs it on this machine, as
    it is or in a sandbox; a command that the runner kills has crashed, for the runner's reason.
    """

    def __init__(
        self,
        argv: Sequence[str],
        timeout_s: float = 600.0,
        *,
        grade: bool = False,
        exit_code_reward: bool = False,
        runner: CommandRunner | None = None,
    ) -> None:
        if grade and exit_code_reward:
            raise ValueError("grade and exit_code_reward exclude each other: one source of the reward")
        self._argv = list(argv)
        self._timeout_s = timeout_s
        self._grade = grade
        self._exit_code_reward = exit_code_reward
        self._runner = runner or HostRunner()

    async def open(self) -> None:
        """Check that it can run at all. Raise SandboxUnavailable."""
        await self._runner.open()

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward | None:
        base_url = self._runner.agent_url(base_url)
        env = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            "HEADGATE_TASK": json.dumps(task.data),
        }
        # Files, since asyncio waits for the end of a pipe, which a grandchild may hold open.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            status = await self._run(env, output, errors)
            stderr = quoted(_end_of(errors))
            if status not in ((0, 1) if self._exit_code_reward else (0,)):
                raise AgentCrashed(f"{self._argv[0]} ended with {status}{stderr}")
            if self._grade:
                return None
            return self._reward(status, _last_line(_end_of(output)), stderr)

    def _reward(self, status: int, line: str, stderr: str) -> Reward | None:
        value = _read(line)
        if isinstance(value, dict) and "reward" not in value:
            raise _crash_of(value, f"{self._argv[0]} reports")
        if value is not _NOTHING:
            return reward_of(value)
        if self._exit_code_reward:
            return Reward(1.0 - status)
        printed = f"its last line is {line[:200]!r}" if line else "it printed nothing"
        raise AgentCrashed(
            f"{self._argv[0]} ended with 0 and stated no reward: {printed}. Print a number as the last line, or let the exit"
            f" status be the reward: [rollout] reward = 'exit-code' in the file, or --exit-code-reward{stderr}"
        )

    async def _run(self, env: dict[str, str], output: IO[bytes], errors: IO[bytes]) -> int:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._runner.run(self._argv, env, output, errors)
        except WorkerFailed as error:
            raise AgentCrashed(str(error)) from error
        except Killed as error:
            raise AgentCrashed(f"{self._argv[0]}: {error}{quoted(_end_of(errors))}", error.reason) from error
        except TimeoutError as error:
            raise overrun("run the agent's command", self._timeout_s, quoted(_end_of(errors))) from error

    async def close(self) -> None:
        """End what `open` began."""
        await self._runner.close()


_NOTHING = object()


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _read(line: str) -> Any:
    """Return the number in a line, as any language prints one (`.5`, `nan`), or its object with `reward` or `error`; else
    `_NOTHING`."""
    try:
        return float(line)
    except ValueError:
        pass
    try:
        value = loads(line)
    except ValueError:
        return _NOTHING
    return value if isinstance(value, dict) and value.keys() & {"reward", "error"} else _NOTHING


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode(errors="replace")


# Long-lived workers


class WorkerAgent:
    """`workers` processes of `argv`, each started at its first task and again after it died.

    For each task a worker reads a line `{"task": ..., "base_url": ..., "api_key": ...}` and writes a line
    `{"reward": ..., "components": ..., "calls": ...}` (`{"reward": null}`: the gateway's graders compute it), or
    `{"error": "...", "reason": "..."}`, which is a crash that it survives. A worker that ends, takes longer than `timeout_s`
    seconds, writes a line that is not a JSON object, or whose call is cancelled, is replaced.
    """

    def __init__(self, argv: Sequence[str], workers: int = 1, timeout_s: float = 600.0) -> None:
        if workers < 1:
            raise ValueError(f"workers must be 1 or more, not {workers}")
        self._timeout_s = timeout_s
        self._workers = [LineWorker(argv, "an agent worker") for _ in range(workers)]
        self._idle: asyncio.LifoQueue[LineWorker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward | None:
        question = json.dumps({"task": task.data, "base_url": base_url, "api_key": api_key}).encode()
        worker = await self._idle.get()
        try:
            async with asyncio.timeout(self._timeout_s):
                if not worker.running:
                    await worker.start()
                response = await worker.ask(question)
        except TimeoutError as error:
            raise overrun("wait for an agent worker", self._timeout_s) from error
        except WorkerFailed as error:
            raise AgentCrashed(str(error)) from error
        finally:
            self._idle.put_nowait(worker)
        if "error" in response:
            raise _crash_of(response, "an agent worker reports")
        return reward_of(response)

    async def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            await worker.end()
