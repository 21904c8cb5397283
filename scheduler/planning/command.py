"""The command `scheduler plan`: reads, plans, and shows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.cluster.sharing import Fit
from scheduler.planning import measured, report
from scheduler.planning.profile import BadProfile, Profile
from scheduler.planning.runs import BadRun, figures_from, runs_of, timeline_from
from scheduler.policies import limits

_WIDTH = 150
"""Columns of a table where stdout is not a terminal."""


def plan(
    profile: Path | None,
    run: Path | None,
    metrics: Sequence[str],
    number: int | None,
    nodes: int | None,
    out: Path | None,
) -> dict[str, Any]:
    """Show a plan for a profile, or for a run, and return it as JSON. Raise BadProfile or BadRun."""
    fit: Fit | None = None
    if run is not None:
        try:
            timeline = timeline_from(run, number, metrics).in_steps()
        except ValueError as error:
            raise BadRun(f"{run}: {error}") from error
        site, basis = measured.site_of(runs_of(run, number), timeline, nodes)
        sites = {run.resolve().name: site}
    else:
        assert profile is not None
        given = Profile.load(profile)
        sites, basis = given.sites_to_try(), [f"the profile {profile}"]
        fit = given.memory.fit if given.memory is not None else None
    try:
        plans = report.plans_of(sites)
    except ValueError as error:
        raise BadProfile(str(error)) from error
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for one in plans:
        table = Table(*report.HEADER, title=one.name, title_justify="left")
        for row in report.rows(one):
            table.add_row(*row)
        console.print(table)
    if fit is not None:
        console.print(
            f"engine and trainer on one GPU: {fit.kind} ({fit.why})", highlight=False, soft_wrap=True
        )
    for line in basis:
        console.print(f"from: {line}", highlight=False, soft_wrap=True)
    summary: dict[str, Any] = {"memory": asdict(fit)} if fit is not None else {}
    if run is not None:
        steps = figures_from(run, number, metrics)
        summary["limits"] = limits.to_json(steps)
        for line in report.limiting(steps):
            console.print(line, highlight=False, soft_wrap=True)
    return report.summary(plans, basis) | summary | (_written(plans[0], out) if out else {})


def _written(best: report.Plan, out: Path) -> dict[str, str]:
    """Write the files of a plan, and return their paths. Without matplotlib there is no picture."""
    out.mkdir(parents=True, exist_ok=True)
    cluster = out / "cluster.toml"
    cluster.write_text(report.cluster_file(best), encoding="utf-8")
    with contextlib.suppress(ImportError):
        report.picture(best, out / "plan.png")
        return {"cluster": str(cluster), "png": str(out / "plan.png")}
    return {"cluster": str(cluster)}
