"""The options of `gateway episodes run` and `match`."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headgate.client import Task
    from headgate.client.order import TaskOrder

AGENT, TASKS, SANDBOX, GATEWAY = "Agent", "Tasks and episodes", "Sandbox", "Gateway"
"""The groups of options in the help."""

Tasks = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help='Tasks: one JSON object a line, each with a "task_id".', rich_help_panel=TASKS
    ),
]
Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="COMMAND...",
        help="After `--`: the command to run once per episode. Its last line is its reward.",
        show_default=False,
    ),
]
Agent = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Instead of a command: an async module:function.", rich_help_panel=AGENT
    ),
]
Worker = Annotated[
    bool,
    typer.Option(
        "--worker",
        help="Keep the command running: it reads tasks and writes rewards as JSON lines.",
        rich_help_panel=AGENT,
    ),
]
Env = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Instead of an agent and tasks: an environment, verifiers:NAME, inspect:TASK, gym:ID or reasoning-gym:NAME.",
        rich_help_panel=AGENT,
    ),
]
EnvArgs = Annotated[
    str, typer.Option(metavar="JSON", help="Arguments of the environment, an object.", rich_help_panel=AGENT)
]
EnvPython = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The Python that has the environment's package. [default: this one]",
        rich_help_panel=AGENT,
    ),
]
EnvSplit = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Which tasks of the environment: train, eval (1 in 16) or all. [default: eval with --mode eval, else train]",
        rich_help_panel=TASKS,
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Use at most N tasks.", rich_help_panel=TASKS)
]
Grade = Annotated[
    bool,
    typer.Option(
        "--grade",
        help="What the command prints is not a reward: the gateway's graders compute it.",
        rich_help_panel=AGENT,
    ),
]
ExitCodeReward = Annotated[
    bool,
    typer.Option(
        "--exit-code-reward",
        help="A command that prints no number is rewarded by its exit status: 0 is 1.0, 1 is 0.0.",
        rich_help_panel=AGENT,
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Episodes per task; in training, their rewards are compared. [default: 8, or 1 with --mode eval]",
        rich_help_panel=TASKS,
    ),
]
Spare = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Extra episodes per task, of which the slowest are dropped ([staleness] spare_members).",
        rich_help_panel=TASKS,
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Episodes that run at the same time, and the number of workers.",
        rich_help_panel=TASKS,
    ),
]
Mode = Annotated[
    str, typer.Option(metavar="NAME", help="train, or eval: recorded, never trained.", rich_help_panel=TASKS)
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The trained model that the episodes are about. [default: the first]",
        rich_help_panel=GATEWAY,
    ),
]
Forever = Annotated[
    bool, typer.Option("--forever", help="Repeat the tasks until interrupted.", rich_help_panel=TASKS)
]
Order = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="With --forever: passes, or difficulty: tasks whose groups have equal rewards are repeated less often.",
        rich_help_panel=TASKS,
    ),
]
OrderFloor = Annotated[
    float,
    typer.Option(
        min=0.001,
        max=1.0,
        metavar="X",
        help="With --order difficulty: the least frequency of a task.",
        rich_help_panel=TASKS,
    ),
]
OrderState = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --forever: the file that keeps the position in the order, for the next start.",
        rich_help_panel=TASKS,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --forever: the seed of the order of the tasks. [default: another each time]",
        rich_help_panel=TASKS,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        min=0.1, metavar="S", help="Seconds that one attempt of an agent may take.", rich_help_panel=AGENT
    ),
]
Sandbox = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Contain the command: bwrap, or docker:IMAGE (docs/topics/sandboxes.md).",
        rich_help_panel=SANDBOX,
    ),
]
SandboxMemory = Annotated[
    int, typer.Option(min=16, metavar="MIB", help="Memory of an agent.", rich_help_panel=SANDBOX)
]
SandboxCpu = Annotated[
    int, typer.Option(min=1, metavar="S", help="Seconds of CPU time of an agent.", rich_help_panel=SANDBOX)
]
SandboxDisk = Annotated[
    int, typer.Option(min=1, metavar="MIB", help="What an agent may write to disk.", rich_help_panel=SANDBOX)
]
SandboxProcesses = Annotated[
    int, typer.Option(min=8, metavar="N", help="Processes of an agent.", rich_help_panel=SANDBOX)
]
SandboxRead = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="Another folder or file that agents may read; may be repeated.",
        rich_help_panel=SANDBOX,
    ),
]
MaxFailures = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="X",
        help="Stop if more than this share of the latest episodes fail (1: never).",
        rich_help_panel=TASKS,
    ),
]


def env_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an environment. Raise ValueError."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--env-args is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError("--env-args is a JSON object")
    return given


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
