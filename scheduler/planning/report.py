"""A plan: the best split of each way to divide the work, its neighbors, and its value under other loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.policies import limits
from scheduler.policies.allocation import (
    SENSITIVITY,
    Sampling,
    Sensitivity,
    Site,
    Split,
    neighbors,
    sensitivity,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to divide the work, at its best."""

    name: str
    site: Site
    best: Split
    neighbors: list[Split]
    sensitivity: list[Sensitivity]


def plans_of(sites: Mapping[str, Site]) -> list[Plan]:
    """Return the plan of each, the best first. Raise ValueError if there are too few nodes."""
    found = []
    for name, site in sites.items():
        best = site.best()
        found.append(Plan(name, site, best, neighbors(site, best), sensitivity(site, best)))
    return sorted(found, key=lambda plan: plan.best.order)


HEADER = (
    "rollout + train",
    "generation s",
    "training s",
    "step s",
    *SENSITIVITY,
    "cost",
    "steps/h for cost 1",
)


def rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the best split, its neighbors, and the best split under each load."""
    for split in [plan.best, *plan.neighbors]:
        under = [plan.site.split(split.rollout, split.train, load).step_s for load in SENSITIVITY.values()]
        yield (
            f"{split.rollout} + {split.train}" + (" (best)" if split is plan.best else ""),
            *(f"{value:.2f}" for value in (split.generation_s, split.training_s, split.step_s, *under)),
            f"{split.cost:.2f}",
            f"{3600 / split.step_s / split.cost:.2f}",
        )
    under_best = [
        f"{one.best.step_s:.2f} ({one.best.rollout} + {one.best.train})" for one in plan.sensitivity
    ]
    yield ("the best there", "", "", f"{plan.best.step_s:.2f}", *under_best, "", "")


def summary(plans: list[Plan], basis: list[str]) -> dict[str, Any]:
    """All plans as JSON, the best first."""
    return {
        "best": _split(plans[0].best) | {"site": plans[0].name},
        "sensitivity": {
            one.name: {
                "step_s": round(one.chosen.step_s, 3),
                "best": _split(one.best),
                "loss": round(one.loss, 4),
            }
            for one in plans[0].sensitivity
        },
        "neighbors": [_split(split) for split in plans[0].neighbors],
        "others": [_split(plan.best) | {"site": plan.name} for plan in plans[1:]],
        "basis": basis,
    }


def _split(split: Split) -> dict[str, Any]:
    return {
        "rollout": split.rollout,
        "train": split.train,
        "step_s": round(split.step_s, 3),
        "generation_s": round(split.generation_s, 3),
        "training_s": round(split.training_s, 3),
        "cost": round(split.cost, 3),
    }


def limiting(steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield what limits a run, and every change with its gain."""
    advice = limits.advise(steps)
    yield limits.line(steps) if advice is None else f"{advice.limits}, by the last {advice.steps} steps"
    yield from (f"  {change}" for change in (advice.changes if advice is not None else ()))


def cluster_file(plan: Plan) -> str:
    """Return a cluster file of the best split, in which the user names the other files and what a node has."""
    best, generation = plan.best, plan.site.generation
    engines = generation.engines if isinstance(generation, Sampling) else 1
    lines = [
        f"# Planned: {best.rollout} sample and {best.train} train, {best.step_s:.2f} s a step (predicted).",
        "# Name the files of your gateway and trainer, and what each node, engine and rank has (cpus, gpus, memory_gb).",
        "",
        "[gateway]",
        'config = "gateway.toml"',
        "",
        "[trainer]",
        'config = "trainer.toml"',
        f"ranks = {best.train}",
    ]
    for number in range(best.rollout):
        lines += ["", f"[nodes.sampler-{number}]", 'tags = ["rollout"]', f"engines = {engines}"]
    for number in range(best.train):
        lines += ["", f"[nodes.learner-{number}]", 'tags = ["train"]']
    return "\n".join(lines) + "\n"


def picture(plan: Plan, path: Path) -> None:
    """Write a PNG: a step's seconds by the number of nodes that sample. Needs matplotlib; raise ImportError without it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    site, most = plan.site, plan.site.rollout.nodes - (plan.site.train is None)
    counts = sorted(
        {1 + round(i * (most - 1) / 400) for i in range(401)} if most > 400 else range(1, most + 1)
    )
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, load in {"as measured": None, **SENSITIVITY}.items():
        splits = [site.best_with(x, load) if load else site.best_with(x) for x in counts]
        style = {"linewidth": 2.2, "color": "#1f2430"} if load is None else {"linewidth": 1.1, "alpha": 0.8}
        axes.plot(counts, [split.step_s for split in splits], label=name, **style)
    axes.plot(
        plan.best.rollout, plan.best.step_s, "o", color="#c77a12", markersize=9, label="the plan", zorder=5
    )
    axes.set(xlabel="nodes that sample", ylabel="seconds of a step, the other nodes training", ylim=(0, None))
    axes.set_ylim(0, 4 * plan.best.step_s)
    axes.set_title(f"{plan.name}: {plan.best.rollout} sample, {plan.best.train} train", loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
