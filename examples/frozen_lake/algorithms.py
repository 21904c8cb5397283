"""Algorithms side by side on FrozenLake, and a frozen control: the same model, maps, steps and seeds, without an engine.

    python -m examples.frozen_lake.algorithms              # what `make report NAME=algorithms` does
    python -m examples.frozen_lake.algorithms --algorithms grpo,rloo --seeds 1 --steps 6 --plot runs/algorithms.png
    python -m examples.frozen_lake.algorithms --algorithms all --plot runs/algorithms.png

Each step samples a batch with the newest weights and trains on it with a `RankTrainer`. The control is the same loop
with a learning rate of 0. Nothing depends on the machine's pace: a seed gives the same run again. A run that is in the folder is
not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from examples.demo.report import smoothed
from examples.frozen_lake import tasks
from examples.frozen_lake.walks import Walker
from headgate.processes.interrupts import exit_at_ctrl_c
from headgate.types import Group
from trainer.algorithms import REGISTRY
from trainer.commands.warmstart import Recipe, warm_start
from trainer.config.settings import Settings
from trainer.model import parallel
from trainer.model.device import prepare_torch
from trainer.rank_trainer import RankTrainer

FROZEN = "frozen"
"""The control: GRPO with a learning rate of 0."""
ALGORITHMS = ("grpo", "rloo", "reinforce++", FROZEN)
"""What is compared unless others are named; `all`: every registered algorithm and the control."""
_OWN: dict[str, dict[str, Any]] = {"dr_grpo": {"length": 128}, "gdpo": {"components": {"reward": 1.0}}}
"""The settings without which an algorithm cannot begin; all others have their defaults."""
SEEDS = (1, 2, 3)
STEPS = 24
MAPS, MEMBERS = 16, 8
"""Maps of a batch, and walks on each."""
HELDOUT, EVALUATION_SEED = 200, 99
LR = 5e-4


def train(
    model: Path, algorithm: str, seed: int, steps: int, lr: float, progress: Progress
) -> dict[str, Any]:
    """Train one run; return the mean reward of each batch, and that of greedy walks on held-out maps before and after."""
    lr = 0.0 if algorithm == FROZEN else lr
    trainer = trainer_of(model, algorithm, seed, steps, lr)
    walker = Walker(model, seed)
    maps = tasks.tasks("train", seed)
    before, rewards = heldout_reward(walker), []
    bar = progress.add_task("", total=steps)
    for _ in range(steps):
        groups, _ = sample(walker, list(itertools.islice(maps, MAPS)), trainer.version)
        rewards.append(trainer.train(groups)["reward_mean"])
        walker.load_weights(trainer.model)
        progress.update(bar, advance=1, description=f"{algorithm}, seed {seed}: reward {rewards[-1]:.2f}")
    progress.remove_task(bar)
    after = heldout_reward(walker)
    return {
        "algorithm": algorithm,
        "seed": seed,
        "lr": lr,
        "before": before,
        "after": after,
        "rewards": rewards,
    }


def trainer_of(model: Path, algorithm: str, seed: int, steps: int, lr: float) -> RankTrainer:
    """Return a trainer with the model's weights."""
    settings = settings_of(model, algorithm, seed, steps, lr)
    prepare_torch(settings)
    return RankTrainer(settings, parallel.join(settings.parallel, "cpu"))


def settings_of(model: Path, algorithm: str, seed: int, steps: int, lr: float) -> Settings:
    """Return the settings of a run."""
    return Settings.parse({
        "run": {"dir": model.parent / "run", "steps": steps, "seed": seed, "device": "cpu", "threads": 1},
        "gateway": {"url": "http://127.0.0.1:8000"},
        "model": {"path": model},
        "algorithm": {"type": "grpo" if algorithm == FROZEN else algorithm, **_OWN.get(algorithm, {})},
        "optimizer": {"lr": lr, "warmup_steps": 5, "betas": [0.9, 0.99]},
    })  # fmt: skip


def sample(walker: Walker, lakes: Sequence[dict[str, Any]], version: int) -> tuple[list[Group], set[str]]:
    """Return `MEMBERS` walks on each map, as groups, and the ids of those that failed."""
    walks = iter(walker.walk([lake["map"] for lake in lakes for _ in range(MEMBERS)]))
    groups, failed = [], set()
    for lake in lakes:
        name = lake["task_id"]
        members = [(f"{name}-{i}", walk) for i, walk in enumerate(itertools.islice(walks, MEMBERS))]
        failed |= {member for member, walk in members if walk.failed}
        episodes = tuple(walk.episode(member, version) for member, walk in members)
        groups.append(Group(name, name, version, episodes))
    return groups, failed


def heldout_reward(walker: Walker, *, greedy: bool = True) -> float:
    """Return the mean reward of walks on the held-out maps, greedy or sampled."""
    lakes = [task["map"] for task in itertools.islice(tasks.tasks("heldout", EVALUATION_SEED), HELDOUT)]
    return sum(walk.crossing.reward for walk in walker.walk(lakes, greedy=greedy)) / HELDOUT


def heldout_rewards(model: Path, seed: int, policy: Any) -> tuple[float, float]:
    """Return the mean rewards of greedy and of sampled walks on the held-out maps; their walker is new, and no tool call
    fails."""
    walker = Walker(model, seed)
    walker.load_weights(policy)
    return heldout_reward(walker), heldout_reward(walker, greedy=False)


def kept(path: Path, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run from its file; the run is made first if there is no file."""
    if not path.exists():
        path.write_text(json.dumps(run()) + "\n")
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def plot(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Plot the training batches' rewards by step, a color for each algorithm and a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for place, name in enumerate(dict.fromkeys(run["algorithm"] for run in runs)):
        for number, run in enumerate(run for run in runs if run["algorithm"] == name):
            curve = smoothed(run["rewards"])
            axes.plot(
                range(1, len(curve) + 1), curve, color=f"C{place}", alpha=0.8, label=None if number else name
            )
    axes.set(xlabel="step", ylabel="mean reward, smoothed", ylim=(0, 1.05))
    axes.set_title("FrozenLake through tool calls: three seeds each; frozen: learning rate 0")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def show(runs: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"{HELDOUT} held-out maps, greedy: mean reward")
    for column in ("algorithm", "seed", "before", "after", "rise"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for run in runs:
        figures = (run["before"], run["after"], run["after"] - run["before"])
        table.add_row(run["algorithm"], str(run["seed"]), *(f"{figure:.3f}" for figure in figures))
    console.print(table)


def main() -> None:
    """Run what is missing in the folder, then report everything that was requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms", default=",".join(ALGORITHMS), help="names, separated by commas, or all"
    )
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="numbers, separated by commas")
    parser.add_argument("--steps", type=int, default=STEPS, help="the number of steps of each run")
    parser.add_argument("--lr", type=float, default=LR, help="the learning rate of all but the control")
    parser.add_argument("--dir", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--plot", type=Path, default=Path("docs/pictures/algorithms.png"))
    options = parser.parse_args()
    names = [*REGISTRY, FROZEN] if options.algorithms == "all" else options.algorithms.split(",")
    console, runs = Console(), []
    with Progress(console=Console(stderr=True)) as progress:
        recipe = Recipe.load(Path(__file__).with_name("warmstart.toml"))
        warm_start(recipe, options.dir / "model", progress=progress)
        for name, seed in itertools.product(names, map(int, options.seeds.split(","))):
            result = options.dir / f"{name}-seed-{seed}-steps-{options.steps}-lr-{options.lr:g}.json"
            run = partial(train, options.dir / "model", name, seed, options.steps, options.lr, progress)
            runs.append(kept(result, run))
    plot(options.plot, runs)
    show(runs, console)
    console.print(f"Look next at {options.plot}", soft_wrap=True)
    rises = {
        name: sum(run["after"] - run["before"] for run in group) / len(group)
        for name in names
        if (group := [run for run in runs if run["algorithm"] == name])
    }
    console.file.write(json.dumps({"report": "algorithms", "rise_mean": rises, "runs": runs}) + "\n")


if __name__ == "__main__":
    with exit_at_ctrl_c():
        main()
