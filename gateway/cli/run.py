"""`gateway episodes run`: run an agent once per episode and post its reward."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.options import AdminKey, Url, Verbose, configure_logging

if TYPE_CHECKING:
    from gateway.client import Agent, EpisodeRunner, Task
    from gateway.client.environment import EnvironmentAgent
    from gateway.client.places import Place
    from gateway.environments.base import Split
    from gateway.types import EpisodeMode

_LONELY = (
    "warning: groups of one episode. An algorithm that compares the episodes of a group, as GRPO does, learns nothing from them:"
    " name a --group-size of 2 or more"
)


def run_episodes(
    tasks: Annotated[
        Path | None, typer.Option(help='Tasks: one JSON object a line, each with a "task_id".')
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: the command to run once per episode. Its last line is its reward."),
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Instead of a command: an async module:function.")] = None,
    worker: Annotated[
        bool, typer.Option(help="Keep the command running: it reads tasks and writes rewards as JSON lines.")
    ] = False,
    env: Annotated[
        str | None,
        typer.Option(
            help="Instead of an agent and tasks: an environment, verifiers:NAME, inspect:TASK, gym:ID or reasoning-gym:NAME."
        ),
    ] = None,
    env_args: Annotated[
        str, typer.Option(help="Arguments of the environment, as a JSON object (docs/environments.md).")
    ] = "{}",
    env_python: Annotated[
        Path | None, typer.Option(help="The Python that has the environment's package. [default: this one]")
    ] = None,
    env_split: Annotated[
        str | None,
        typer.Option(
            help="Its tasks: train, eval (one in 16) or all. [default: eval with --mode eval, else train]"
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many tasks.")] = None,
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
    grade: Annotated[
        bool,
        typer.Option(help="What the command prints is no reward: the gateway's graders compute it."),
    ] = False,
    exit_code_reward: Annotated[
        bool,
        typer.Option(
            help="A command that prints no number is rewarded by its exit status: 0 is 1.0, 1 is 0.0."
        ),
    ] = False,
    group_size: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    spare: Annotated[
        int,
        typer.Option(
            min=0,
            help="Extra episodes per task, of which the slowest are dropped ([staleness] spare_members).",
        ),
    ] = 0,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Episodes that run at the same time, and the number of workers.")
    ] = 8,
    mode: Annotated[str, typer.Option(help="train, or eval: recorded, never trained.")] = "train",
    model: Annotated[
        str | None, typer.Option(help="The trained model that the episodes are about. [default: the first]")
    ] = None,
    forever: Annotated[
        bool, typer.Option(help="Go through the tasks again and again, until interrupted.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one run of a command may take.")
    ] = 600.0,
    sandbox: Annotated[
        str | None,
        typer.Option(help="Contain the command: bwrap, or docker:IMAGE (docs/sandboxes.md)."),
    ] = None,
    sandbox_memory: Annotated[
        int, typer.Option(min=16, help="MiB that an agent in a sandbox may take.")
    ] = 2048,
    sandbox_cpu: Annotated[
        int, typer.Option(min=1, help="Seconds of CPU time that an agent in a sandbox may take.")
    ] = 600,
    sandbox_disk: Annotated[
        int, typer.Option(min=1, help="MiB that an agent in a sandbox may write.")
    ] = 1024,
    sandbox_processes: Annotated[
        int, typer.Option(min=8, help="Processes that an agent in a sandbox may have.")
    ] = 256,
    sandbox_read: Annotated[
        list[Path] | None,
        typer.Option(help="Another folder or file that agents in sandboxes may read. Can be repeated."),
    ] = None,
    max_failures: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Stop when more than this share of the latest episodes failed; 1 never stops.",
        ),
    ] = 0.5,
    verbose: Verbose = False,
) -> None:
    """Run an agent once per episode, with OPENAI_BASE_URL and OPENAI_API_KEY of its own, and post its reward.

    A command's reward is a number, or an object with "reward", in its last line. One that ends with another status than 0, or
    prints no number, has failed: its episode is not trained, and what it wrote to standard error is kept (`episodes why`).

    An agent that has no reward (a function that returns None, a worker that writes {"reward": null}, a command with --grade) is
    graded by the gateway.

    Examples:

      gateway episodes run --tasks tasks.jsonl --group-size 8 --concurrency 16 -- python my_agent.py

      gateway episodes run --tasks tasks.jsonl --mode eval --agent my_package.agent:solve

      gateway episodes run --env reasoning-gym:chain_sum --env-args '{"size": 2000}' --group-size 8

      gateway episodes run --tasks tasks.jsonl --group-size 8 --sandbox bwrap -- python my_agent.py
    """
    from gateway.client import GatewayRefused, GatewayUnreachable, RunStopped
    from gateway.client.agents import read_tasks
    from gateway.client.sandboxes.base import SandboxUnavailable

    configure_logging(verbose)
    limits = {
        "memory_mib": sandbox_memory,
        "cpu_s": sandbox_cpu,
        "disk_mib": sandbox_disk,
        "processes": sandbox_processes,
    }
    try:
        place = _place(sandbox, limits, sandbox_read or []) if sandbox else None
        if place is not None and (worker or not command):
            raise ValueError("--sandbox contains a command that is run once per episode")
        if env is None:
            chosen = _agent(
                agent, command or [], worker, concurrency, timeout, grade, exit_code_reward, place
            )
        elif agent is None and not command:
            chosen = _environment(env, env_args, env_python, timeout)
        else:
            raise ValueError("--env brings its own agent: leave out --agent and the command")
        if tasks is None and env is None:
            raise ValueError("name --tasks FILE, or an environment that has its own, with --env")
        found = None if tasks is None else read_tasks(tasks)[:limit]
        split = _split(env_split or ("eval" if mode == "eval" else "train"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if spare and mode == "eval":
        raise typer.BadParameter("--spare is for training: evaluations count every episode")
    kind = {
        "group_size": group_size,
        "spare": spare,
        "concurrency": concurrency,
        "mode": _mode(mode),
        "model": model,
        "max_failures": max_failures,
    }
    if group_size == 1 and mode == "train":
        typer.echo(_LONELY, err=True)
    try:
        summary = asyncio.run(_run(gateway, admin_key, chosen, found or (split, limit), forever, kind))
    except (ValueError, GatewayUnreachable, GatewayRefused, RunStopped, SandboxUnavailable) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(summary))
    raise typer.Exit(1 if summary["failed"] and not forever else 0)


async def _run(
    url: str,
    admin_key: str | None,
    agent: Agent,
    tasks: list[Task] | tuple[Split, int | None],
    forever: bool,
    kind: dict[str, Any],
) -> dict[str, float]:
    """`tasks`: or the split of an environment's own, and their number at most. `kind`: the arguments of the EpisodeRunner.

    Raises ValueError if the environment cannot be loaded, and SandboxUnavailable.
    """
    from gateway.cli.progress import EpisodeProgress
    from gateway.client import EpisodeRunner, GatewayClient
    from gateway.client.agents import CommandAgent
    from gateway.client.environment import EnvironmentAgent

    try:
        if isinstance(tasks, tuple):
            assert isinstance(agent, EnvironmentAgent)
            tasks = await agent.tasks(*tasks)
        if isinstance(agent, CommandAgent):
            await agent.open()
        total = None if forever else len(tasks) * (kind["group_size"] + kind["spare"])
        async with GatewayClient(url, admin_key) as client:
            with EpisodeProgress(total) as progress:
                runner = EpisodeRunner(client, agent, on_outcome=progress.add, on_wait=progress.wait, **kind)
                await _drive(runner, tasks, forever)
    finally:
        await agent.close()
    return progress.summary()


async def _drive(runner: EpisodeRunner, tasks: list[Task], forever: bool) -> None:
    if not forever:
        await runner.run(tasks)
        return
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await runner.run_forever(tasks, stop)


def _agent(
    name: str | None,
    command: list[str],
    worker: bool,
    workers: int,
    timeout_s: float,
    grade: bool,
    exit_code_reward: bool,
    place: Place | None,
) -> Agent:
    from gateway.client.agents import CommandAgent, WorkerAgent, load_agent

    if (name is None) == (not command):
        raise ValueError("give an agent with --agent or a command after `--`, not both")
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
        return load_agent(name)
    if worker:
        return WorkerAgent(command, workers, timeout_s)
    return CommandAgent(command, timeout_s, grade=grade, exit_code_reward=exit_code_reward, place=place)


def _place(sandbox: str, limits: dict[str, int], read: list[Path]) -> Place:
    from gateway.client.sandboxes import sandbox_of
    from gateway.client.sandboxes.base import Limits
    from gateway.client.sandboxes.place import Sandboxed

    return Sandboxed(sandbox_of(sandbox, Limits(**limits), read))


def _environment(name: str, args: str, python: Path | None, timeout_s: float) -> EnvironmentAgent:
    from gateway.client.environment import EnvironmentAgent

    try:
        given = json.loads(args)
    except ValueError as error:
        raise ValueError(f"--env-args is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError("--env-args is a JSON object")
    return EnvironmentAgent(name, given, python, timeout_s)


def _split(value: str) -> Split:
    from typing import get_args

    from gateway.environments.base import Split

    if value not in get_args(Split):
        raise ValueError(f"--env-split is one of {', '.join(get_args(Split))}, not {value!r}")
    split: Split = value  # type: ignore[assignment]
    return split


def _mode(value: str) -> EpisodeMode:
    if value not in ("train", "eval"):
        raise typer.BadParameter("must be train or eval", param_hint="--mode")
    return "eval" if value == "eval" else "train"
