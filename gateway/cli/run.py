"""`gateway episodes run`: run an agent once per episode and post its reward."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gateway.cli import run_options as options
from gateway.cli.options import AdminKey, Url, Verbose, configure_logging

if TYPE_CHECKING:
    from headgate.client import Agent, EpisodeRunner, Task
    from headgate.client.command_runner import CommandRunner
    from headgate.client.environment import EnvironmentAgent
    from headgate.client.order import TaskOrder
    from headgate.client.sandboxes.base import Limits
    from headgate.environments.base import Split
    from headgate.types import EpisodeMode

_GROUP_SIZE = 8
_LONELY = (
    "warning: groups of one episode. An algorithm that compares the episodes of a group, as GRPO does, learns nothing from them:"
    " name a --group-size of 2 or more"
)


def run_episodes(
    command: options.Command = None,
    agent: options.Agent = None,
    worker: options.Worker = False,
    env: options.Env = None,
    env_args: options.EnvArgs = "{}",
    env_python: options.EnvPython = None,
    grade: options.Grade = False,
    exit_code_reward: options.ExitCodeReward = False,
    timeout: options.Timeout = 600.0,
    tasks: options.Tasks = None,
    env_split: options.EnvSplit = None,
    limit: options.Limit = None,
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
    group_size: options.GroupSize = None,
    spare: options.Spare = 0,
    concurrency: options.Concurrency = 8,
    mode: options.Mode = "train",
    model: options.Model = None,
    forever: options.Forever = False,
    order: options.Order = "passes",
    order_floor: options.OrderFloor = 0.1,
    order_state: options.OrderState = None,
    seed: options.Seed = None,
    sandbox: options.Sandbox = None,
    sandbox_memory: options.SandboxMemory = 2048,
    sandbox_cpu: options.SandboxCpu = 600,
    sandbox_disk: options.SandboxDisk = 1024,
    sandbox_processes: options.SandboxProcesses = 256,
    sandbox_read: options.SandboxRead = None,
    max_failures: options.MaxFailures = 0.5,
    verbose: Verbose = False,
) -> None:
    """Run an agent once per episode, with OPENAI_BASE_URL and OPENAI_API_KEY of its own, and post its reward.

    A command's reward is a number, or an object with "reward", in its last line. One that ends with another status than 0, or
    prints no number, has failed: its episode is not trained, and what it wrote to standard error is kept (`episodes why`).

    An agent that has no reward (a function that returns None, a worker that writes {"reward": null}, a command with --grade) is
    graded by the gateway.

    Examples:

      gateway episodes run --tasks tasks.jsonl --concurrency 16 -- python my_agent.py

      gateway episodes run --tasks tasks.jsonl --mode eval --agent my_package.agent:solve

      gateway episodes run --env reasoning-gym:chain_sum --env-args '{"size": 2000}'

      gateway episodes run --tasks tasks.jsonl --sandbox bwrap -- python my_agent.py
    """
    from headgate.client import EpisodeRunner, GatewayRefused, GatewayUnreachable, RunStopped
    from headgate.client.sandboxes.base import Limits, SandboxUnavailable
    from headgate.processes.interrupts import STATUS
    from headgate.processes.unending import Program

    configure_logging(verbose)
    try:
        _check_together(env, sandbox, agent, command, worker)
        if env is None:
            limits = Limits(sandbox_memory, sandbox_cpu, sandbox_disk, sandbox_processes)
            runner = _runner(sandbox, limits, sandbox_read or []) if sandbox else None
            chosen = _agent(
                agent, command or [], worker, concurrency, timeout, grade, exit_code_reward, runner
            )
        else:
            chosen = _environment(env, env_args, env_python, timeout)
        split = _split(env_split or ("eval" if mode == "eval" else "train"))
        found = _tasks(tasks, limit) if tasks or not env else (split, limit)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if order not in ("passes", "difficulty"):
        raise typer.BadParameter(f"passes or difficulty, not {order!r}", param_hint="--order")
    group_size = group_size or (1 if mode == "eval" else _GROUP_SIZE)
    if order == "difficulty" and (not forever or group_size == 1):
        raise typer.BadParameter("--order difficulty is for --forever, and groups of 2 and more")
    options.check_order(forever, order_state, seed)
    if spare and mode == "eval":
        raise typer.BadParameter("--spare is for training: evaluations count every episode")
    make_runner = partial(
        EpisodeRunner,
        group_size=group_size,
        spare=spare,
        concurrency=concurrency,
        mode=_mode(mode),
        model=model,
        max_failures=max_failures,
        describe=grade,
    )
    episodes_per_task = None if forever else group_size + spare
    if group_size == 1 and mode == "train":
        typer.echo(_LONELY, err=True)
    floor = order_floor if order == "difficulty" else None
    ordered = partial(options.order_of, order_state, seed, floor)
    program = Program()
    try:
        summary = program.run(
            _run(gateway, admin_key, chosen, found, make_runner, episodes_per_task, ordered)
        )
    except (ValueError, GatewayUnreachable, GatewayRefused, RunStopped, SandboxUnavailable) as error:
        typer.echo(str(error), err=True)
        program.exit(1)
    typer.echo(json.dumps(summary))
    if summary.get("interrupted") and not forever:
        program.exit(STATUS)
    program.exit(1 if summary.get("cancelled") or (summary["failed"] and not forever) else 0)


async def _run(
    url: str,
    admin_key: str | None,
    agent: Agent,
    tasks: list[Task] | tuple[Split, int | None],
    make_runner: Callable[..., EpisodeRunner],
    episodes_per_task: int | None,
    ordered: Callable[[list[Task]], TaskOrder],
) -> dict[str, float | None]:
    """`tasks`: or the split of an environment's own, and their number at most. `episodes_per_task`: None
    for a run without an end, of whose tasks `ordered` makes the order.

    Raise ValueError if the environment cannot be loaded, and SandboxUnavailable.
    """
    from gateway.cli.progress import ENDING, EpisodeProgress
    from headgate.client import GatewayClient
    from headgate.client.agents import CommandAgent
    from headgate.client.environment import EnvironmentAgent
    from headgate.processes.interrupts import interruptible

    try:
        if isinstance(tasks, tuple):
            assert isinstance(agent, EnvironmentAgent)
            tasks = await agent.tasks(*tasks)
        if isinstance(agent, CommandAgent):
            await agent.open()
        forever = episodes_per_task is None
        order = ordered(tasks) if forever else None
        total = len(tasks) * episodes_per_task if episodes_per_task is not None else None
        async with GatewayClient(url, admin_key) as client:
            with EpisodeProgress(total) as progress:
                runner = make_runner(
                    client, agent, on_outcome=progress.add, on_wait=progress.wait, order=order
                )
                work = runner.run_forever(tasks, asyncio.Event()) if forever else _once(runner, tasks)
                with progress.interrupts():
                    await interruptible(work, progress.report, ENDING)
    finally:
        await agent.close()
    return progress.summary()


async def _once(runner: EpisodeRunner, tasks: list[Task]) -> None:
    await runner.run(tasks)


def _check_together(
    env: str | None, sandbox: str | None, agent: str | None, command: list[str] | None, worker: bool
) -> None:
    """Raise ValueError for options that exclude one another."""
    if sandbox and (worker or not command):
        raise ValueError("--sandbox contains a command that is run once per episode")
    if env and (agent or command):
        raise ValueError("--env brings its own agent: leave out --agent and the command")


def _tasks(path: Path | None, limit: int | None) -> list[Task]:
    from headgate.client.agents import read_tasks

    if path is None:
        raise ValueError("name --tasks FILE, or an environment that has its own, with --env")
    try:
        found = read_tasks(path)
    except FileNotFoundError as error:
        raise ValueError(f"--tasks {path}: no such file") from error
    except OSError as error:
        raise ValueError(f"--tasks {path}: {error.strerror}") from error
    if not found:
        raise ValueError(
            f"--tasks {path}: the file has no tasks: write one JSON object with a task_id on each line"
        )
    return found[:limit]


def _agent(
    name: str | None,
    command: list[str],
    worker: bool,
    workers: int,
    timeout_s: float,
    grade: bool,
    exit_code_reward: bool,
    runner: CommandRunner | None,
) -> Agent:
    from headgate.client.agents import CommandAgent, WorkerAgent, load_agent

    if name is None and not command:
        raise ValueError(
            "name an agent: a command after `--` (`-- python my_agent.py`), a function with --agent module:function, or an"
            " environment with --env"
        )
    if name is not None and command:
        raise ValueError("there are two agents: leave out --agent, or the command after `--`")
    if command and runner is None and shutil.which(command[0]) is None:
        raise ValueError(f"cannot start the agent: {command[0]}: no such program")
    if grade and (worker or name is not None):
        raise ValueError(
            '--grade is for a command: a function asks to be graded by None, a worker by {"reward": null}'
        )
    if exit_code_reward and (worker or name is not None):
        raise ValueError("--exit-code-reward is for a command: functions and workers state a number")
    if name is not None:
        # Unlike `python -m`, a console script does not look for an agent's module in the current folder.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        return load_agent(name, timeout_s)
    if worker:
        return WorkerAgent(command, workers, timeout_s)
    return CommandAgent(command, timeout_s, grade=grade, exit_code_reward=exit_code_reward, runner=runner)


def _runner(sandbox: str, limits: Limits, read: list[Path]) -> CommandRunner:
    from headgate.client.sandboxes import sandbox_of
    from headgate.client.sandboxes.runner import SandboxRunner

    return SandboxRunner(sandbox_of(sandbox, limits, read))


def _environment(name: str, args: str, python: Path | None, timeout_s: float) -> EnvironmentAgent:
    from headgate.client.environment import EnvironmentAgent

    return EnvironmentAgent(name, options.env_arguments(args), python, timeout_s)


def _split(value: str) -> Split:
    from typing import get_args

    from headgate.environments.base import Split

    if value not in get_args(Split):
        raise ValueError(f"--env-split is one of {', '.join(get_args(Split))}, not {value!r}")
    split: Split = value  # type: ignore[assignment]
    return split


def _mode(value: str) -> EpisodeMode:
    if value not in ("train", "eval"):
        raise typer.BadParameter("must be train or eval", param_hint="--mode")
    return "eval" if value == "eval" else "train"
