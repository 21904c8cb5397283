"""`make report-simulation`: every policy over the frozen grid, as a table, a plot and a JSON line. Every figure is simulated.

Keys of the JSON line, for headgate's own policy (`combined`, with the scenario's split of the GPUs, as the baselines; null where
it was not run):
- vs_sync: the most that it is over `sync_colocated` in a scenario;
- vs_best_async: the most that it is over the best asynchronous baseline that keeps the same bound;
- worst_vs_any: the least that it is over any baseline that keeps the same bound, in any scenario;
- vs_best_async_unbounded, worst_vs_any_unbounded: the same over all baselines, also those that train on older groups;
- idle_1024: its idle share with 1,024 GPUs;
- planned: the same keys for `combined_planned`, which divides the GPUs as `scheduler plan` would.
A baseline keeps the bound if no trained group was older than eta in any run; what does not is shown, and marked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scheduler.simulate.frozen import HERE, digest
from scheduler.simulate.registry import OWN, PLANNED, POLICIES
from scheduler.simulate.scenario import Scenario
from scheduler.simulate.study import Outcome, run

SYNCHRONOUS = ("sync_colocated", "sync_split")
LARGE = "large-32b-1024"
_COLUMNS = 3


def bounded(outcome: Outcome, eta: int) -> bool:
    """True if no trained group was older than eta."""
    return max(outcome.values("staleness_max")) <= eta


def goals(
    found: dict[str, list[Outcome]], etas: dict[str, int], policy: str = OWN
) -> dict[str, float | None]:
    """The keys of a policy of headgate's, of the outcomes by scenario; None where it or its rivals are missing."""
    over_sync: list[float] = []
    over_async: dict[bool, list[float]] = {True: [], False: []}
    over_any: dict[bool, list[float]] = {True: [], False: []}
    idle: float | None = None
    for name, outcomes in found.items():
        own = next((outcome for outcome in outcomes if outcome.policy == policy), None)
        if own is None:
            continue
        everybody = [outcome for outcome in outcomes if outcome.policy not in (OWN, PLANNED)]
        over_sync += [own.over(rival).mean for rival in everybody if rival.policy == "sync_colocated"]
        for strict in (True, False):
            rivals = [o for o in everybody if not strict or bounded(o, etas[name])]
            over_any[strict] += [own.over(rival).mean for rival in rivals]
            asynchronous = [own.over(rival).mean for rival in rivals if rival.policy not in SYNCHRONOUS]
            over_async[strict] += [min(asynchronous)] if asynchronous else []
        idle = own.estimate("idle_share").mean if name == LARGE else idle
    return {
        "vs_sync": max(over_sync, default=None),
        "vs_best_async": max(over_async[True], default=None),
        "worst_vs_any": min(over_any[True], default=None),
        "vs_best_async_unbounded": max(over_async[False], default=None),
        "worst_vs_any_unbounded": min(over_any[False], default=None),
        "idle_1024": idle,
    }


def main(
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Runs of each policy in each scenario.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="A scenario of the grid; repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="A folder for the JSON and the plot.")] = Path("runs/simulation"),
) -> None:
    """Simulates the grid."""
    found: dict[str, list[Outcome]] = {}
    etas: dict[str, int] = {}
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted((HERE / "scenarios").glob("*.toml")):
        if only and path.stem not in only:
            continue
        scenario = Scenario.load(path)
        etas[path.stem] = scenario.eta
        found[path.stem] = run(scenario, POLICIES, range(seeds), lambda what: typer.echo(what, err=True))
        _show(path.stem, found[path.stem], scenario.eta)
    report: dict[str, Any] = {
        "simulated": True,
        "frozen": digest(),
        "seeds": seeds,
        **goals(found, etas),
        "planned": goals(found, etas, PLANNED),
        "scenarios": {name: [outcome.to_json() for outcome in outcomes] for name, outcomes in found.items()},
    }
    (out / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    _plot(found, etas, out / "simulation.png")
    typer.echo(json.dumps({key: value for key, value in report.items() if key != "scenarios"}))


def _show(name: str, outcomes: Sequence[Outcome], eta: int) -> None:
    typer.echo(f"\nSimulated: {name}, eta {eta}; * does not keep that bound; ± is 95 % over seeds")
    heading = (
        f"{'policy':<16}{'trained tokens/s':>24}{'over sync':>18}{'idle':>8}{'staleness':>11}{'wasted':>8}"
    )
    typer.echo(heading)
    sync = next(outcome for outcome in outcomes if outcome.policy == "sync_colocated")
    for outcome in outcomes:
        rate, over = outcome.estimate("tokens_per_s"), outcome.over(sync)
        typer.echo(
            f"{outcome.policy + ('' if bounded(outcome, eta) else '*'):<16}"
            f"{rate.mean:>13,.0f} ±{rate.half:>9,.0f}{over.mean:>9.2f} ± {over.half:<6.2f}"
            f"{outcome.estimate('idle_share').mean:>8.1%}{outcome.estimate('staleness_mean').mean:>11.2f}"
            f"{outcome.estimate('wasted_share').mean:>8.1%}"
        )
    sys.stdout.flush()


def _plot(found: dict[str, list[Outcome]], etas: dict[str, int], path: Path) -> None:
    """Trained tokens/s over synchronous colocated, a panel a scenario; who does not keep the bound is pale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(found) // _COLUMNS)
    figure, panels = plt.subplots(rows, _COLUMNS, figsize=(4.2 * _COLUMNS, 2.6 * rows), squeeze=False)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (name, outcomes) in zip(panels.flat, found.items(), strict=False):
        sync = next(outcome for outcome in outcomes if outcome.policy == "sync_colocated")
        ratios = [outcome.over(sync) for outcome in outcomes]
        own = ["tab:blue" if o.policy in (OWN, PLANNED) else "dimgray" for o in outcomes]
        colors = [c if bounded(o, etas[name]) else "lightgray" for c, o in zip(own, outcomes, strict=True)]
        axes.barh(
            [o.policy for o in outcomes],
            [r.mean for r in ratios],
            xerr=[r.half for r in ratios],
            color=colors,
            capsize=2,
        )
        axes.invert_yaxis()
        axes.set_title(f"{name}, eta {etas[name]}", loc="left", fontsize=9)
        axes.tick_params(labelsize=7)
    figure.suptitle(
        "Trained tokens/s over sync_colocated (simulated); pale: does not keep the bound", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
