"""The options of `gateway episodes run` and `match`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headgate.client import Task
    from headgate.client.order import TaskOrder

Tasks = Annotated[Path | None, typer.Option(help='Tasks: one JSON object a line, each with a "task_id".')]
Command = Annotated[
    list[str] | None,
    typer.Argument(help="After `--`: the command to run once per episode. Its last line is its reward."),
]
Agent = Annotated[str | None, typer.Option(help="Instead of a command: an async module:function.")]
Worker = Annotated[
    bool, typer.Option(help="Keep the command running: it reads tasks and writes rewards as JSON lines.")
]
Env = Annotated[
    str | None,
    typer.Option(
        help="Run an environment instead of an agent and tasks: verifiers:NAME, inspect:TASK, gym:ID or reasoning-gym:NAME."
    ),
]
EnvArgs = Annotated[
    str, typer.Option(help="Arguments of the environment, as a JSON object (docs/topics/environments.md).")
]
EnvPython = Annotated[
    Path | None, typer.Option(help="The Python that has the environment's package. [default: this one]")
]
EnvSplit = Annotated[
    str | None,
    typer.Option(
        help="Its tasks: train, eval (one in 16) or all. [default: eval with --mode eval, else train]"
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many tasks.")]
Grade = Annotated[
    bool,
    typer.Option(help="Ignore the command's output: the gateway's graders compute the reward."),
]
ExitCodeReward = Annotated[
    bool,
    typer.Option(help="A command that prints no number is rewarded by its exit status: 0 is 1.0, 1 is 0.0."),
]
GroupSize = Annotated[int, typer.Option(min=1, help="Episodes per task.")]
Spare = Annotated[
    int,
    typer.Option(
        min=0,
        help="Extra episodes per task, of which the slowest are dropped ([staleness] spare_members).",
    ),
]
Concurrency = Annotated[
    int, typer.Option(min=1, help="Episodes that run at the same time, and the number of workers.")
]
Mode = Annotated[str, typer.Option(help="train, or eval: recorded, never trained.")]
Model = Annotated[
    str | None, typer.Option(help="The trained model that the episodes are about. [default: the first]")
]
Forever = Annotated[bool, typer.Option(help="Go through the tasks again and again, until interrupted.")]
Order = Annotated[
    str,
    typer.Option(
        help="With --forever: passes, or difficulty: tasks with equal rewards in their groups are played less often."
    ),
]
OrderFloor = Annotated[
    float,
    typer.Option(min=0.001, max=1.0, help="With --order difficulty: a task is played at least this often."),
]
OrderState = Annotated[
    Path | None,
    typer.Option(help="With --forever: the file that keeps the position in the order, for the next start."),
]
Seed = Annotated[
    int | None,
    typer.Option(help="With --forever: the seed of the order of the tasks. [default: another each time]"),
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that one attempt of an agent may take.")]
Sandbox = Annotated[
    str | None,
    typer.Option(help="Contain the command: bwrap, or docker:IMAGE (docs/topics/sandboxes.md)."),
]
SandboxMemory = Annotated[int, typer.Option(min=16, help="MiB that an agent in a sandbox may take.")]
SandboxCpu = Annotated[
    int, typer.Option(min=1, help="Seconds of CPU time that an agent in a sandbox may take.")
]
SandboxDisk = Annotated[int, typer.Option(min=1, help="MiB that an agent in a sandbox may write.")]
SandboxProcesses = Annotated[int, typer.Option(min=8, help="Processes that an agent in a sandbox may have.")]
SandboxRead = Annotated[
    list[Path] | None,
    typer.Option(help="Another folder or file that agents in sandboxes may read. Can be repeated."),
]
MaxFailures = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Stop when more than this share of the latest episodes failed; 1 never stops.",
    ),
]


def check_order(forever: bool, state: Path | None, seed: int | None) -> None:
    """Refuse options of an order for a run that plays each task once."""
    if not forever and (state is not None or seed is not None):
        raise typer.BadParameter("--order-state and --seed are for --forever: else each task comes once")


def order_of(state: Path | None, seed: int | None, floor: float | None, tasks: list[Task]) -> TaskOrder:
    """Return the order of the tasks of a run without an end.

    `state`: the file that keeps it. `floor`: the least weight of the order by difficulty; None: the tasks come in passes.
    """
    from headgate.client.kept_order import KeptOrder
    from headgate.client.order import ByDifficulty, Passes

    if not tasks:
        raise ValueError("there are no tasks")
    seed = secrets.randbits(32) if seed is None else seed
    order = Passes(tasks, seed) if floor is None else ByDifficulty(tasks, seed, floor)
    return KeptOrder(order, state) if state is not None else order
