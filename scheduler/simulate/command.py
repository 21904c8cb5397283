"""`scheduler simulate`: policies in a scenario, as a table and a JSON line. Every figure is simulated."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from scheduler.simulate.errors import ScenarioError
from scheduler.simulate.gantt import draw
from scheduler.simulate.registry import POLICIES
from scheduler.simulate.scenario import Scenario
from scheduler.simulate.study import Outcome, run

_COLUMNS = {
    "tokens_per_s": ("trained tokens/s", "{:,.0f}"),
    "bounded_tokens_per_s": ("of them within eta", "{:,.0f}"),
    "ub_fraction": ("of the bound", "{:.2f}"),
    "idle_share": ("idle", "{:.1%}"),
    "rollout_share": ("rollout", "{:.1%}"),
    "train_share": ("train", "{:.1%}"),
    "switching_share": ("switching", "{:.1%}"),
    "useful_share": ("useful", "{:.1%}"),
    "staleness_mean": ("staleness, mean", "{:.2f}"),
    "staleness_max": ("of groups, most", "{:.0f}"),
    "wasted_share": ("wasted", "{:.1%}"),
    "seconds_per_batch": ("s/batch", "{:,.1f}"),
}


def simulate(
    path: Path,
    policies: list[str],
    seeds: int,
    gantt: Path | None = None,
    engine_gpus: int | None = None,
) -> None:
    """Runs them and prints; draws each policy's first seed into a folder of `gantt`. Raises SimulationError."""
    scenario = Scenario.load(path, engine_gpus)
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise ScenarioError(f"no policy {unknown[0]!r}; there are: {', '.join(POLICIES)}")
    chosen = {name: POLICIES[name] for name in policies or POLICIES}
    outcomes = run(scenario, chosen, range(seeds), lambda what: typer.echo(what, err=True))
    _show(scenario, outcomes, seeds)
    if gantt is not None:
        for name, policy in chosen.items():
            typer.echo(draw(scenario, policy(), 0, gantt / name)["html"], err=True)
    typer.echo(
        json.dumps(
            {
                "simulated": True,
                "scenario": scenario.name,
                "engine_gpus": scenario.engine_gpus,
                "policies": [o.to_json() for o in outcomes],
            }
        )
    )


def _show(scenario: Scenario, outcomes: list[Outcome], seeds: int) -> None:
    title = (
        f"Simulated: {scenario.name}, {scenario.gpus} {scenario.gpu}, {scenario.model}, "
        f"engines of {scenario.engine_gpus}, {scenario.train_gpus} GPUs train where that is apart; {seeds} seeds, ± is 95 %"
    )
    console = Console(width=None if sys.stdout.isatty() else 170)
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for heading, _ in _COLUMNS.values():
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.policy, *(_cell(outcome, figure, form) for figure, (_, form) in _COLUMNS.items())
        )
    console.print(table)


def _cell(outcome: Outcome, figure: str, form: str) -> str:
    found = outcome.estimate(figure)
    return form.format(found.mean) + (f" ± {form.format(found.half)}" if found.half else "")
