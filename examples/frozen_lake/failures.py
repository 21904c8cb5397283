"""The cost of failures that are taken for rewards of 0: FrozenLake with one tool call in ten failing, with and without the masks.

    python -m examples.frozen_lake.failures                    # what `make report NAME=failures` does
    python -m examples.frozen_lake.failures --seeds 1 --steps 6 --dir runs/quick

A tool call that fails ends its episode. *as zeros*: the episode is trained with the reward that it has, 0, as an agent's harness
does that swallows the error. *excluded*: it is left out of its group with its tokens, as the driver does with an agent that
raises. *no failures*: the same without any. The same model, maps, steps and seeds, in one process as in `algorithms`; held-out
maps are walked without failures, greedily and by samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from examples.frozen_lake import tasks
from examples.frozen_lake.algorithms import (
    HELDOUT,
    LR,
    MAPS,
    SEEDS,
    heldout_rewards,
    kept,
    sample,
    trainer_of,
)
from examples.frozen_lake.walks import Walker
from headgate.processes.interrupts import exit_at_ctrl_c
from headgate.types import Group
from trainer.commands.warmstart import Recipe, warm_start

AS_ZEROS, EXCLUDED, NONE = "as zeros", "excluded", "no failures"
FAILS = 0.1
STEPS = 12
_LEAST = 2
"""Episodes of a group that can be compared."""


def without_failures(groups: list[Group], failed: set[str]) -> list[Group]:
    """Return the groups without the episodes that failed, and without groups that have too few left."""
    kept = (replace(g, episodes=tuple(e for e in g.episodes if e.episode_id not in failed)) for g in groups)
    return [group for group in kept if len(group.episodes) >= _LEAST]


def train(model: Path, arm: str, seed: int, steps: int, fails: float, progress: Progress) -> dict[str, Any]:
    """Train one run; return the figures of each batch, and the mean reward on held-out maps before and after."""
    trainer = trainer_of(model, "grpo", seed, steps, LR)
    walker = Walker(model, seed, 0.0 if arm == NONE else fails)
    maps = tasks.tasks("train", seed)
    before, sampled_before = heldout_rewards(model, seed, trainer.model)
    rewards, shares, calls = [], [], []
    bar = progress.add_task("", total=steps)
    for _ in range(steps):
        groups, failed = sample(walker, list(itertools.islice(maps, MAPS)), trainer.version)
        episodes = sum(len(group.episodes) for group in groups)
        shares.append(len(failed) / episodes)
        calls.append(sum(n.sampled for g in groups for e in g.episodes for n in e.nodes) / episodes)
        rewards.append(
            trainer.train(without_failures(groups, failed) if arm == EXCLUDED else groups)["reward_mean"]
        )
        walker.load_weights(trainer.model)
        progress.update(bar, advance=1, description=f"{arm}, seed {seed}: reward {rewards[-1]:.2f}")
    progress.remove_task(bar)
    after, sampled_after = heldout_rewards(model, seed, trainer.model)
    return {
        "arm": arm, "seed": seed, "steps": steps, "before": before, "after": after,
        "sampled_before": sampled_before, "sampled_after": sampled_after,
        "failed_share": sum(shares) / steps, "rewards": rewards, "calls": calls,
    }  # fmt: skip


def show(runs: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        title=f"{FAILS:.0%} of tool calls fail; {HELDOUT} held-out maps without failures: mean reward"
    )
    for column in (
        "failures",
        "seed",
        "greedy before",
        "after",
        "sampled before",
        "after",
        "episodes that failed",
        "last batch: reward",
        "calls",
    ):
        table.add_column(column, justify="left" if column == "failures" else "right")
    for run in runs:
        rewards = (run[name] for name in ("before", "after", "sampled_before", "sampled_after"))
        figures = (*rewards, run["failed_share"], run["rewards"][-1], run["calls"][-1])
        table.add_row(run["arm"], str(run["seed"]), *(f"{figure:.3f}" for figure in figures))
    console.print(table)


def main() -> None:
    """Run what is missing in the folder, then report everything that was requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="numbers, separated by commas")
    parser.add_argument("--steps", type=int, default=STEPS, help="the number of steps of each run")
    parser.add_argument("--dir", type=Path, default=Path("runs/failures"))
    options = parser.parse_args()
    console, runs = Console(width=120), []
    with Progress(console=Console(stderr=True)) as progress:
        recipe = Recipe.load(Path(__file__).with_name("warmstart.toml"))
        warm_start(recipe, options.dir / "model", progress=progress)
        for seed, arm in itertools.product(map(int, options.seeds.split(",")), (AS_ZEROS, EXCLUDED, NONE)):
            result = options.dir / f"{arm.replace(' ', '-')}-seed-{seed}-steps-{options.steps}.json"
            run = partial(train, options.dir / "model", arm, seed, options.steps, FAILS, progress)
            runs.append(kept(result, run))
    show(runs, console)
    after = {
        arm: sum(run["sampled_after"] for run in found) / len(found)
        for arm in (AS_ZEROS, EXCLUDED, NONE)
        if (found := [run for run in runs if run["arm"] == arm])
    }
    console.file.write(
        json.dumps({"report": "failures", "fails": FAILS, "sampled_after_mean": after, "runs": runs}) + "\n"
    )


if __name__ == "__main__":
    with exit_at_ctrl_c():
        main()
