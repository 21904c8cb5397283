"""Orders of tasks on a simulated learner: what difficulty is worth beside passes at the same number of sampled tokens.

    python -m bench.orders                # what `make bench-orders` does; seconds

The learner is a table: for each place of each task's answer a softmax over four tokens, trained by GRPO's advantages on groups of
eight. A task of length n pays 1 if all n tokens are right, so untrained it pays once in 4^n tries; no task teaches another. The
orders are the driver's own (`gateway.client.order`). It says how orders spend tokens, and nothing of language models.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from gateway.client.agents import Task
from gateway.client.order import ByDifficulty, Passes, TaskOrder

FloatArray = npt.NDArray[np.float64]
LENGTHS = (1, 2, 3, 4, 5, 6)
OF_EACH = 16
"""Tasks of each length."""
CHOICES, MEMBERS, LR, FLOOR = 4, 8, 0.5, 0.1
SEEDS = (1, 2, 3)
TOKENS = (25_000, 50_000, 100_000, 200_000)


class Learner:
    """The tables of all tasks; token 0 is right everywhere."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        lengths = [length for length in LENGTHS for _ in range(OF_EACH)]
        self.tables = {f"{length}-{n}": np.zeros((length, CHOICES)) for n, length in enumerate(lengths)}

    def group(self, name: str) -> tuple[int, bool]:
        """Plays and learns one group; the number of its tokens, and whether its rewards differ."""
        table = self.tables[name]
        chances = softmax(table)
        said = np.stack([
            self._random.choice(CHOICES, size=MEMBERS, p=chances[place]) for place in range(len(table))
        ])  # fmt: skip
        rewards = (said == 0).all(0).astype(float)
        teaches = bool(rewards.min() < rewards.max())
        if teaches:
            advantages = (rewards - rewards.mean()) / rewards.std()
            taken = np.eye(CHOICES)[said]
            table += LR * np.einsum("m,pmc->pc", advantages, taken - chances[:, None]) / MEMBERS
        return said.size, teaches

    def reward(self) -> float:
        """The mean reward over all tasks, exactly."""
        return float(np.mean([softmax(table)[:, 0].prod() for table in self.tables.values()]))


def softmax(table: FloatArray) -> FloatArray:
    """Probabilities of each row."""
    weights: FloatArray = np.exp(table - table.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def run(by_difficulty: bool, seed: int) -> dict[str, float]:
    """The mean reward after each number of tokens, and the share of groups that taught."""
    learner = Learner(seed)
    tasks = [Task(name, {}) for name in learner.tables]
    order: TaskOrder = ByDifficulty(tasks, seed, FLOOR) if by_difficulty else Passes(tasks, seed)
    spent, groups, taught = 0, 0, 0
    found: dict[str, float] = {}
    for budget in TOKENS:
        while spent < budget:
            name = order.next().task_id
            tokens, teaches = learner.group(name)
            order.ended(name, teaches)
            spent, groups, taught = spent + tokens, groups + 1, taught + teaches
        found[str(budget)] = learner.reward()
    return {**found, "taught": taught / groups}


def main() -> None:
    """All runs, a table, and one JSON object as the last line."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    console = Console(width=110)
    runs: list[dict[str, str | float]] = []
    table = Table(title="simulated: mean reward over all tasks after so many sampled tokens")
    columns = [*map(str, TOKENS), "taught"]
    for column in ("order", "seed", *columns):
        table.add_column(column, justify="left" if column == "order" else "right")
    for seed in SEEDS:
        for name in ("passes", "difficulty"):
            figures = run(name == "difficulty", seed)
            runs.append({"order": name, "seed": seed, **figures})
            table.add_row(name, str(seed), *(f"{figures[column]:.3f}" for column in columns))
    console.print(table)
    console.file.write(json.dumps({"bench": "orders", "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
