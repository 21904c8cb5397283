"""The worth of an order of tasks by difficulty: FrozenLake in passes and by difficulty, the same number of sampled tokens each.

    python -m examples.frozen_lake.curriculum                    # what `make report NAME=curriculum` does
    python -m examples.frozen_lake.curriculum --seeds 1 --tokens 20000 --dir runs/quick

The same model, maps and seeds, in one process as in `algorithms`; a run ends with the batch in which it has sampled enough.
Held-out maps are walked greedily and by samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
from headgate.client import Task
from headgate.client.order import (
    ByDifficulty,
    Passes,
    TaskOrder,
)
from headgate.processes.interrupts import exit_at_ctrl_c
from headgate.rewards import all_equal
from headgate.types import Group
from trainer.commands.warmstart import Recipe, warm_start

PASSES, DIFFICULTY = "passes", "difficulty"
TRAIN_MAPS = 64
FLOOR = 0.1
TOKENS = 50_000
MOST_STEPS = 200
"""For the learning rate's schedule and as a bound; no run gets there."""


def teaches(group: Group) -> bool:
    """Return true if a group's rewards differ."""
    return not all_equal([episode.reward for episode in group.episodes])


def train(model: Path, arm: str, seed: int, budget: int, progress: Progress) -> dict[str, Any]:
    """Train one run; return its batches' figures, and the mean reward on held-out maps before and after."""
    trainer, walker = trainer_of(model, "grpo", seed, MOST_STEPS, LR), Walker(model, seed)
    maps = [Task(lake["task_id"], lake) for lake in itertools.islice(tasks.tasks("train", seed), TRAIN_MAPS)]
    order: TaskOrder = Passes(maps, seed) if arm == PASSES else ByDifficulty(maps, seed, FLOOR)
    before, sampled_before = heldout_rewards(model, seed, trainer.model)
    spent = 0
    rewards: list[float] = []
    taught: list[float] = []
    bar = progress.add_task("", total=budget)
    while spent < budget and len(rewards) < MOST_STEPS:
        groups, _ = sample(walker, [order.next().data for _ in range(MAPS)], trainer.version)
        for group in groups:
            order.ended(group.task_id, teaches(group))
        spent += sum(n.ids.size for g in groups for e in g.episodes for n in e.nodes if n.sampled)
        taught.append(sum(map(teaches, groups)) / len(groups))
        rewards.append(trainer.train(groups)["reward_mean"])
        walker.load_weights(trainer.model)
        progress.update(bar, completed=spent, description=f"{arm}, seed {seed}: reward {rewards[-1]:.2f}")
    progress.remove_task(bar)
    after, sampled_after = heldout_rewards(model, seed, trainer.model)
    return {
        "arm": arm, "seed": seed, "tokens": spent, "steps": len(rewards), "before": before, "after": after,
        "sampled_before": sampled_before, "sampled_after": sampled_after,
        "taught_share": sum(taught) / len(taught), "taught": taught, "rewards": rewards,
    }  # fmt: skip


def show(runs: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"{TRAIN_MAPS} maps, {HELDOUT} held-out maps: mean reward at equal sampled tokens")
    names = ("seed", "tokens", "steps", "before", "after", "sampled_before", "sampled_after", "taught_share")
    for column in ("arm", *names):
        table.add_column(column.replace("_", " "), justify="left" if column == "arm" else "right")
    for run in runs:
        figures = (run[name] for name in names)
        table.add_row(run["arm"], *(f"{f:.3f}" if isinstance(f, float) else str(f) for f in figures))
    console.print(table)


def main() -> None:
    """Run what is missing in the folder, then report everything that was requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="numbers, separated by commas")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="sampled tokens of each run")
    parser.add_argument("--dir", type=Path, default=Path("runs/curriculum"))
    options = parser.parse_args()
    console, runs = Console(width=120), []
    with Progress(console=Console(stderr=True)) as progress:
        recipe = Recipe.load(Path(__file__).with_name("warmstart.toml"))
        warm_start(recipe, options.dir / "model", progress=progress)
        for seed, arm in itertools.product(map(int, options.seeds.split(",")), (PASSES, DIFFICULTY)):
            result = options.dir / f"{arm}-seed-{seed}-tokens-{options.tokens}.json"
            run = partial(train, options.dir / "model", arm, seed, options.tokens, progress)
            runs.append(kept(result, run))
    show(runs, console)
    console.file.write(json.dumps({"report": "curriculum", "floor": FLOOR, "runs": runs}) + "\n")


if __name__ == "__main__":
    with exit_at_ctrl_c():
        main()
