"""`make report NAME=simulation`: every policy over the frozen grid, as tables, a plot and a JSON line. Every figure is simulated.

The main table and the keys give all policies the same trainer (`SAME`): it takes groups as they finish, and log-probabilities are
those that were recorded. In a second table, which `--no-own` leaves out, each policy has its own trainer, as in its source.

Keys of the JSON line, for headgate's own policy (`combined`, with the scenario's split of the GPUs, as the baselines; null where
it was not run); a scenario counts with the mean over its seeds:
- ub_fraction_geomean, ub_fraction_worst: trained tokens/s over the upper bound (`upper_bound.py`), in the mean and at worst;
- vs_best_bounded_geomean, vs_best_bounded_worst: over the best baseline that keeps the same bound, in the mean and at worst;
- vs_best_masked_geomean, vs_best_masked_worst: over the best baseline whether it keeps the bound or not, where tokens older than
  eta do not count, as if they were masked; in the mean and at worst;
- vs_sync_max: the most that it is over `sync_colocated` in a scenario;
- useful_share: the part of all GPU time that the trained tokens need at least, in the mean;
- planned: the same keys for `combined_planned`, which divides the GPUs as `scheduler plan` would;
- own_trainer: the same keys where every baseline has its own trainer.
A baseline keeps the bound if no trained group was older than eta in any run; others are shown, and marked.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.simulate.frozen import HERE, digest
from lab.simulate.registry import OWN, PLANNED, POLICIES, RIVALS
from lab.simulate.scenario import Scenario
from lab.simulate.study import Outcome, run

SYNCHRONOUS = "sync_colocated"
SAME = {"stream": 64, "recompute": False}
"""The trainer of all policies in the main table: headgate's own."""
_COLUMNS = 3
Found = dict[str, list[Outcome]]


def bounded(outcome: Outcome, eta: int) -> bool:
    """Return true if no trained group was older than eta."""
    return max(outcome.values("staleness_max")) <= eta


def goals(found: Found, etas: dict[str, int], policy: str = OWN) -> dict[str, float | None]:
    """Return the keys of one of headgate's policies; None where it or its rivals are missing."""
    fractions: list[float] = []
    useful: list[float] = []
    over_sync: list[float] = []
    over_best: list[float] = []
    over_masked: list[float] = []
    for name, outcomes in found.items():
        own = next((outcome for outcome in outcomes if outcome.policy == policy), None)
        if own is None:
            continue
        rivals = [o for o in outcomes if o.policy not in (OWN, PLANNED) and bounded(o, etas[name])]
        fractions.append(own.estimate("ub_fraction").mean)
        useful.append(own.estimate("useful_share").mean)
        over_best += [min(own.over(rival).mean for rival in rivals)] if rivals else []
        masked = [o.estimate("bounded_tokens_per_s").mean for o in outcomes if o.policy not in (OWN, PLANNED)]
        over_masked += [own.estimate("tokens_per_s").mean / max(masked)] if masked else []
        over_sync += [own.over(rival).mean for rival in outcomes if rival.policy == SYNCHRONOUS]
    return {
        "ub_fraction_geomean": _geomean(fractions),
        "ub_fraction_worst": min(fractions, default=None),
        "vs_best_bounded_geomean": _geomean(over_best),
        "vs_best_bounded_worst": min(over_best, default=None),
        "vs_best_masked_geomean": _geomean(over_masked),
        "vs_best_masked_worst": min(over_masked, default=None),
        "vs_sync_max": max(over_sync, default=None),
        "useful_share": statistics.fmean(useful) if useful else None,
    }


def _geomean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def main(
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Runs of each policy in each scenario.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="A scenario of the grid; repeatable.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"Policy to run in addition to {SYNCHRONOUS}; repeatable. [default: all]"),
    ] = None,
    own: Annotated[bool, typer.Option(help="Also give each policy its own trainer.")] = True,
    out: Annotated[Path, typer.Option(help="A folder for the JSON and the plot.")] = Path("runs/simulation"),
) -> None:
    """Simulate the grid."""
    if unknown := set(policy or ()) - POLICIES.keys():
        raise typer.BadParameter(f"no policy {', '.join(sorted(unknown))}; there are: {', '.join(POLICIES)}")
    ours = {name: make for name, make in POLICIES.items() if not policy or name in (SYNCHRONOUS, *policy)}
    theirs = {name: make for name, make in RIVALS.items() if name in ours}
    found: Found = {}
    own_trainer: Found = {}
    etas: dict[str, int] = {}
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted((HERE / "scenarios").glob("*.toml")):
        if only and path.stem not in only:
            continue
        scenario = Scenario.load(path)
        etas[path.stem] = scenario.eta
        same = found[path.stem] = run(scenario.model_copy(update=SAME), ours, range(seeds), _begins)
        _show(f"{path.stem}, the same trainer for all", same, scenario.eta)
        if own:
            unchanged = [outcome for outcome in same if outcome.policy not in RIVALS]
            own_trainer[path.stem] = [*run(scenario, theirs, range(seeds), _begins), *unchanged]
            _show(f"{path.stem}, each policy's own trainer", own_trainer[path.stem], scenario.eta)
    report: dict[str, Any] = {
        "simulated": True,
        "frozen": digest(),
        "seeds": seeds,
        **goals(found, etas),
        "planned": goals(found, etas, PLANNED),
        "own_trainer": goals(own_trainer, etas),
        "scenarios": _json(found),
        "scenarios_own_trainer": _json(own_trainer),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    _plot(found, etas, out / "simulation.png")
    typer.echo(json.dumps({key: value for key, value in report.items() if not key.startswith("scenarios")}))


def _begins(what: str) -> None:
    typer.echo(what, err=True)


def _json(found: Found) -> dict[str, Any]:
    return {name: [outcome.to_json() for outcome in outcomes] for name, outcomes in found.items()}


def _show(name: str, outcomes: Sequence[Outcome], eta: int) -> None:
    typer.echo(f"\nSimulated: {name}, eta {eta}; * does not keep that bound; ± is 95 % over seeds")
    heading = (
        f"{'policy':<22}{'trained tokens/s':>24}{'within eta':>12}{'over sync':>18}{'of bound':>10}"
        f"{'useful':>8}{'idle':>8}{'staleness':>11}{'wasted':>8}"
    )
    typer.echo(heading)
    sync = next(outcome for outcome in outcomes if outcome.policy == SYNCHRONOUS)
    for outcome in outcomes:
        rate, over = outcome.estimate("tokens_per_s"), outcome.over(sync)
        typer.echo(
            f"{outcome.policy + ('' if bounded(outcome, eta) else '*'):<22}"
            f"{rate.mean:>13,.0f} ±{rate.half:>9,.0f}"
            f"{outcome.estimate('bounded_tokens_per_s').mean:>12,.0f}{over.mean:>9.2f} ± {over.half:<6.2f}"
            f"{outcome.estimate('ub_fraction').mean:>10.2f}{outcome.estimate('useful_share').mean:>8.1%}"
            f"{outcome.estimate('idle_share').mean:>8.1%}{outcome.estimate('staleness_mean').mean:>11.2f}"
            f"{outcome.estimate('wasted_share').mean:>8.1%}"
        )
    sys.stdout.flush()


def _plot(found: Found, etas: dict[str, int], path: Path) -> None:
    """Plot trained tokens/s over synchronous colocated, a panel a scenario; pale: does not keep the bound."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(found) // _COLUMNS)
    figure, panels = plt.subplots(rows, _COLUMNS, figsize=(4.2 * _COLUMNS, 3.4 * rows), squeeze=False)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (name, outcomes) in zip(panels.flat, found.items(), strict=False):
        sync = next(outcome for outcome in outcomes if outcome.policy == SYNCHRONOUS)
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
        "Trained tokens/s over sync_colocated, the same trainer for all (simulated); pale: does not keep the bound",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
