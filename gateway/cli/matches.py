"""`gateway episodes match`: play matches of several trained models, each in an episode of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli import run_options as options
from gateway.cli.options import AdminKey, Url, Verbose, configure_logging

if TYPE_CHECKING:
    from gateway.cli.progress import EpisodeProgress
    from headgate.client import Task
    from headgate.client.matches import Matches, Play


def run_matches(
    agent: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The match: an async module:function, or file.py:function, `play(task, players)`.",
        ),
    ],
    tasks: Annotated[
        Path,
        typer.Option(
            rich_help_panel=options.TASKS,
            metavar="FILE",
            help='Tasks: one JSON object a line, each with a "task_id".',
        ),
    ],
    players: Annotated[
        str,
        typer.Option(
            rich_help_panel=options.TASKS,
            metavar="LIST",
            help="The trained model of each player: red=MODEL,blue=MODEL.",
        ),
    ],
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
    group_size: Annotated[
        int, typer.Option(min=1, rich_help_panel=options.TASKS, metavar="N", help="Matches per task.")
    ] = 8,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1, rich_help_panel=options.TASKS, metavar="N", help="Matches that run at the same time."
        ),
    ] = 8,
    mode: options.Mode = "train",
    forever: options.Forever = False,
    order_state: options.OrderState = None,
    seed: options.Seed = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Seconds that one match may take.")
    ] = 600.0,
    max_failures: options.MaxFailures = 0.5,
    verbose: Verbose = False,
) -> None:
    """Play matches of several trained models: each is a player with its own episode, and one outcome rewards all.

    The function receives the task and, by player, a `base_url` and an `api_key`; it returns a reward for each player. A match
    that raises is left out for all players.

    Examples:

      gateway episodes match --agent duel.py:play --tasks tasks.jsonl --players first=red,second=blue --forever
    """
    from headgate.client import GatewayRefused, GatewayUnreachable, RunStopped
    from headgate.client.agents import function_named, read_tasks
    from headgate.client.matches import Matches, parse_players
    from headgate.processes.interrupts import STATUS
    from headgate.processes.unending import Program

    configure_logging(verbose)
    if mode not in ("train", "eval"):
        raise typer.BadParameter("must be train or eval", param_hint="--mode")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        models, play, found = parse_players(players), function_named(agent), read_tasks(tasks)
        options.check_order(forever, order_state, seed)
        order = options.order_of(order_state, seed, None, found) if forever else None
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    make_matches = partial(
        Matches,
        group_size=group_size,
        concurrency=concurrency,
        mode=mode,
        max_failures=max_failures,
        timeout_s=timeout,
        order=order,
    )
    total = None if forever else len(found) * group_size * len(models)
    program = Program()
    try:
        work = _run(gateway, admin_key, play, models, found, make_matches, total)
        summary, progress = program.run(work)
    except (GatewayUnreachable, GatewayRefused, RunStopped) as error:
        typer.echo(str(error), err=True)
        program.exit(1)
    typer.echo(json.dumps(summary))
    if progress.interrupted and not forever:
        program.exit(STATUS)
    failed = not forever and any(player["failed"] for player in summary.values())
    program.exit(1 if progress.cancelled or failed else 0)


async def _run(
    url: str,
    admin_key: str | None,
    play: Play,
    models: dict[str, str],
    tasks: list[Task],
    make_matches: Callable[..., Matches],
    total: int | None,
) -> tuple[dict[str, dict[str, float | None]], EpisodeProgress]:
    """Return the summary of each player's episodes, and how the run has ended. `total`: its episodes; None: without an end."""
    from gateway.cli.progress import ENDING, EpisodeProgress
    from headgate.client import GatewayClient
    from headgate.processes.interrupts import interruptible

    async with GatewayClient(url, admin_key) as client:
        with EpisodeProgress(total) as progress:
            matches = make_matches(client, play, models, on_outcome=progress.add, on_wait=progress.wait)
            with progress.interrupts():
                await interruptible(
                    matches.run(tasks, asyncio.Event() if total is None else None), progress.report, ENDING
                )
    return matches.summary(), progress
