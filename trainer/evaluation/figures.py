"""The figures of an evaluation, from the outcomes of its episodes. Pure.

A failed episode has no reward. The mean leaves it out (`reward_mean`) or counts it as 0 (`reward_mean_failed_as_0`); for pass@k
it has not solved its task, and for best@k it is the worst of its task's samples, worth 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from headgate.client import EpisodeOutcome
from trainer.config.eval import EvalSettings

Rewards = Sequence[float | None]
"""The rewards of a task's samples; None for those that failed."""
_Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that at least one of k samples solves a task of which c of n samples did, without bias.

    1 - C(n - c, k) / C(n, k) (Chen et al., 2021, arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_of_k(rewards: Rewards, k: int) -> float:
    """Return the expected greatest reward of k of a task's samples without replacement; failed ones rank last, as 0."""
    rewarded = sorted(reward for reward in rewards if reward is not None)
    ranked = [0.0] * (len(rewards) - len(rewarded)) + rewarded
    drawn = sum(reward * math.comb(worse, k - 1) for worse, reward in enumerate(ranked))
    return drawn / math.comb(len(ranked), k)


def interval(tasks: Sequence[Rewards]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean reward; None if fewer than two tasks have one.

    Tasks are independent, samples of one task are not: the standard error is clustered by task (Miller, 2024, arXiv 2411.00640,
    section 2.2), times sqrt(T / (T - 1)) for T tasks.
    """
    clusters = [found for task in tasks if (found := [reward for reward in task if reward is not None])]
    if len(clusters) < 2:
        return None
    mean, n = fmean(reward for task in clusters for reward in task), sum(map(len, clusters))
    squares = sum(sum(reward - mean for reward in task) ** 2 for task in clusters)
    half = _Z * math.sqrt(squares * len(clusters) / (len(clusters) - 1)) / n
    return mean - half, mean + half


def figures(outcomes: Sequence[EpisodeOutcome], settings: EvalSettings) -> dict[str, Any]:
    """Return the figures of the tasks that these outcomes are of; `reward_mean` is None if all failed.

    An outcome counts for its own task, wherever it stands, and a sample without an outcome failed.
    """
    size = settings.samples
    found: defaultdict[tuple[int, str], list[float | None]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.task_number, outcome.task_id].append(outcome.reward)
    tasks = [[*rewards, *[None] * (size - len(rewards))] for rewards in found.values()]
    every = [reward for rewards in tasks for reward in rewards]
    rewards = [reward for reward in every if reward is not None]
    around = interval(tasks)
    solved = [sum(reward is not None and reward >= settings.solved for reward in task) for task in tasks]
    return {
        "reward_mean": _mean(rewards, len(rewards)),
        "reward_ci95": around and [round(end, 6) for end in around],
        "reward_mean_failed_as_0": _mean(rewards, len(every)),
        **{
            f"pass@{k}": _mean([pass_at_k(size, c, k) for c in solved], len(tasks))
            for k in settings.ks
        },
        **{f"best@{k}": _mean([best_of_k(task, k) for task in tasks], len(tasks)) for k in settings.ks},
        "tasks": len(tasks),
        "episodes": len(every),
        "rewarded": len(rewards),
        "failed": len(every) - len(rewards),
    }  # fmt: skip


def _mean(values: Sequence[float], count: int) -> float | None:
    return round(sum(values) / count, 6) if count else None


def scalars(result: dict[str, Any]) -> dict[str, float]:
    """Return the result's numbers by name, such as `eval/reward_mean`; those of a file are `eval/FILE/reward_mean`."""
    found: dict[str, float] = {"eval/seconds": result["seconds"]}
    for place, row in {
        "eval": result,
        **{f"eval/{name}": row for name, row in result["files"].items()},
    }.items():
        low, high = row["reward_ci95"] or (None, None)
        counts = ("reward_mean", "reward_mean_failed_as_0", "tasks", "episodes", "failed")
        values = {name: row[name] for name in row if name in counts or name.startswith(("pass@", "best@"))}
        values |= {"reward_ci95_low": low, "reward_ci95_high": high}
        found |= {f"{place}/{name}": float(value) for name, value in values.items() if value is not None}
    return found


def in_a_line(result: dict[str, Any]) -> str:
    """Return the result in short."""
    around, failed = result["reward_ci95"], result["failed"]
    parts = ["reward " + ("-" if result["reward_mean"] is None else f"{result['reward_mean']:.3f}")]
    parts[0] += f" ({around[0]:.3f} to {around[1]:.3f})" if around else ""
    parts += [f"{name} {result[name]:.3f}" for name in result if name.startswith("pass@")]
    parts += [f"{failed} of {result['episodes']} episodes failed"] if failed else []
    sampled = [number for number in result["versions"] if number != str(result["version"])]
    parts += [f"sampled by versions {', '.join(result['versions'])}"] if sampled else []
    return ", ".join([*parts, f"{result['seconds']:.1f} s"])


def warnings(result: dict[str, Any]) -> list[str]:
    """Return the reasons why the result's figures are not those of one version on all tasks."""
    messages = []
    if failed := result["failed"]:
        messages.append(
            f"warning: {failed} of {result['episodes']} episodes failed: reward_mean leaves them out, reward_mean_failed_as_0 and"
            " best@k count them as 0, pass@k as not solved"
        )
    versions = result["versions"]
    if versions.keys() - {str(result["version"])}:
        by_version = ", ".join(f"{n} of version {number}" for number, n in versions.items())
        messages.append(
            f"warning: the model was updated after the evaluation began at version {result['version']}: the figures are of"
            f" episodes of several versions ({by_version}); for those of one, evaluate while no training runs"
        )
    if result["temperature"] == 0 and result["samples"] > 1:
        messages.append(
            "warning: greedy samples of one task differ only by chance: name a temperature above 0, or one sample"
        )
    return messages
