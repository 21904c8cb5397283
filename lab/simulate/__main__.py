"""`python -m lab.simulate SCENARIO`: policies in a scenario, as a table and a JSON line. Every figure is simulated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lab.simulate.errors import ScenarioError, SimulationError
from lab.simulate.scenario import Scenario
from lab.simulate.study import POLICIES, Estimate, estimates

_COLUMNS = {
    "tokens_per_s": ("trained tokens/s", "{:,.0f}"),
    "idle_share": ("idle", "{:.1%}"),
    "rollout_share": ("rollout", "{:.1%}"),
    "train_share": ("train", "{:.1%}"),
    "switching_share": ("switching", "{:.1%}"),
    "staleness_mean": ("staleness, mean", "{:.2f}"),
    "wasted_share": ("wasted", "{:.1%}"),
    "seconds_per_batch": ("s/batch", "{:,.1f}"),
}


def main(
    path: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A scenario in TOML (lab/notes/simulation.md).")
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; repeatable. [default: all policies]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each policy.")] = 3,
    engine_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of an engine, in place of the scenario's.")
    ] = None,
) -> None:
    """Simulate policies on a cluster: tokens/s, use of the GPUs, staleness, waste."""
    try:
        scenario = Scenario.load(path, engine_gpus)
        if unknown := [name for name in policy or () if name not in POLICIES]:
            raise ScenarioError(f"no policy {unknown[0]!r}; there are: {', '.join(POLICIES)}")
        found = {name: estimates(scenario, name, range(seeds)) for name in policy or POLICIES}
    except SimulationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    _show(scenario, found, seeds)
    figures = {
        name: {figure: estimate.to_json() for figure, estimate in estimates_of.items()}
        for name, estimates_of in found.items()
    }
    summary = {"simulated": True, "scenario": scenario.name, "engine_gpus": scenario.engine_gpus}
    typer.echo(json.dumps({**summary, "seeds": seeds, "policies": figures}))


def _show(scenario: Scenario, found: dict[str, dict[str, Estimate]], seeds: int) -> None:
    title = (
        f"Simulated: {scenario.name}, {scenario.gpus} {scenario.gpu}, {scenario.model}, "
        f"engines of {scenario.engine_gpus}, {scenario.train_gpus} GPUs train where that is separate; {seeds} seeds, ± is 95 %"
    )
    console = Console(width=None if sys.stdout.isatty() else 170)
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for heading, _ in _COLUMNS.values():
        table.add_column(heading, justify="right")
    for name, figures in found.items():
        table.add_row(name, *(_cell(figures[figure], form) for figure, (_, form) in _COLUMNS.items()))
    console.print(table)


def _cell(estimate: Estimate, form: str) -> str:
    return form.format(estimate.mean) + (f" ± {form.format(estimate.half)}" if estimate.half else "")


if __name__ == "__main__":
    typer.run(main)
