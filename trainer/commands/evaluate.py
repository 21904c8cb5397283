"""`trainer eval`: evaluates the model that a gateway serves, and prints its figures."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from headgate.client import EpisodeOutcome, GatewayClient
from trainer.config.settings import Settings
from trainer.evaluation.episodes import Evaluated, Evaluation, tasks_of
from trainer.evaluation.episodes import evaluate as run_episodes
from trainer.evaluation.figures import warnings
from trainer.loop.children import gateway_process
from trainer.loop.tasks import run_with_companions

OVERALL = "overall"
_WIDE = 240
"""Columns of a line in a file or a pipe."""


async def evaluate(settings: Settings, json_out: Path | None = None) -> None:
    """Print a table, and as the last line of standard output one JSON object. Raise ConfigError without agent or tasks."""
    evaluation = Evaluation.of(settings)
    agent = evaluation.load()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.close)
        files = await tasks_of(evaluation, agent)
        total = sum(map(len, files.values())) * evaluation.eval.samples
        url, gateway = await gateway_process(stack, settings.gateway, settings.run.dir)
        client = await stack.enter_async_context(GatewayClient(url, settings.gateway.key))
        with _progress() as progress:
            bar = progress.add_task("episodes", total=total)

            def advance(_: EpisodeOutcome) -> None:
                progress.advance(bar)

            evaluated = await run_with_companions(
                run_episodes(client, evaluation, agent, files, advance), gateway
            )
    _report(evaluated, json_out)


def _progress() -> Progress:
    return Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def table_of(result: dict[str, Any]) -> Table:
    """Return the figures, a row for each file and, of several, one for all."""
    table = Table(title=f"evaluation of version {result['version']}, {result['seconds']:g} s")
    ks = [name for name in result if name.startswith(("pass@", "best@"))]
    table.add_column("tasks of")
    for name in ("reward", "95 %", "failed as 0", *ks, "tasks", "episodes", "failed"):
        table.add_column(name, justify="right")
    rows = dict(result["files"])
    if len(rows) > 1:
        rows[OVERALL] = result
    for name, row in rows.items():
        around = row["reward_ci95"]
        table.add_row(
            name,
            _shown(row["reward_mean"]),
            "-" if around is None else f"{around[0]:.3f} to {around[1]:.3f}",
            _shown(row["reward_mean_failed_as_0"]),
            *(_shown(row[k]) for k in ks),
            *(str(row[count]) for count in ("tasks", "episodes", "failed")),
        )
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _report(evaluated: Evaluated, json_out: Path | None) -> None:
    if json_out is not None:
        evaluated.write(json_out)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table_of(evaluated.result))
    for warning in warnings(evaluated.result):
        console.print(warning, highlight=False, markup=False, soft_wrap=True)
    for error in dict.fromkeys(o.error for o in evaluated.outcomes if o.error):
        console.print(f"failed: {error}", highlight=False, markup=False)
    # rich would wrap the line.
    console.file.write(json.dumps(evaluated.result) + "\n")
