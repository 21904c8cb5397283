"""Reports a demo run: a table, a plot, and `summary.json`, from the files that the run left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from headgate.end_reasons import failed

_SMOOTHING = 0.2
"""Weight of the newest value in a smoothed curve."""
_CLOSED = "train/closed/"


def summarize(
    directory: Path,
    *,
    seed: int,
    frozen: bool,
    before: dict[str, Any],
    after: dict[str, Any],
    facts: dict[str, Any],
    seconds: dict[str, float],
    title: str,
) -> dict[str, Any]:
    """Return the run's figures; also written to `summary.json`, and drawn to `reward.png`."""
    records = [
        json.loads(line) for line in (directory / "trainer" / "metrics.jsonl").read_text().splitlines()
    ]
    reports = [report for version in facts["versions"] for report in version["report"]]
    probes = Counter(report["probe"]["verdict"] for report in reports if report["probe"])
    proofs = Counter(report["proof"]["verdict"] for report in reports if report["proof"])
    summary = {
        "seed": seed,
        "frozen": frozen,
        "reward_before": before["reward_mean"],
        "reward_after": after["reward_mean"],
        "heldout_tasks": after["tasks"],
        **components(before, "before"),
        **components(after, "after"),
        "updates": facts["status"]["updates"],
        "streams_across_updates": facts["status"]["streams_across_updates"],
        "most_streams_across_one_update": max(report["streams"] for report in reports),
        "failed_requests": failed_requests(facts, before, after),
        "abandoned_requests": abandoned_requests(facts["metrics"]),
        "engine_restarts": sum(bool(report["failure"]) for report in reports),
        "probes": {verdict: probes[verdict] for verdict in ("passed", "indistinct", "failed")},
        "proofs": {verdict: proofs[verdict] for verdict in ("proven", "partial", "failed", "none")},
        "episodes_trained": sum(int(record["episodes"]) for record in records),
        "tokens_trained": sum(int(record["trained_tokens"]) for record in records),
        "staleness_mean": _mean([record["staleness_mean"] for record in records]),
        "staleness_max": max(record["staleness_max"] for record in records),
        "logprob_gap_mean": _mean([r["logprob_gap_mean"] for r in records if "logprob_gap_mean" in r]),
        "logprob_gap_max": max(r["logprob_gap_max"] for r in records if "logprob_gap_max" in r),
        "update_seconds_median": _median([sum(report["seconds"].values()) for report in reports]),
        "seconds": round(seconds["total"], 1),
        "seconds_by_step": seconds,
    }
    (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(directory / "reward.png", records, summary, title)
    return summary


def components(evaluation: dict[str, Any], when: str) -> dict[str, float]:
    """Return the means of the components that the agent reported in an evaluation, such as `tool_calls_before`."""
    reported = [outcome["components"] for outcome in evaluation["outcomes"]]
    names = sorted({name for components in reported for name in components})
    return {f"{name}_{when}": _mean([c[name] for c in reported if name in c]) for name in names}


def failed_requests(facts: dict[str, Any], *evaluations: dict[str, Any]) -> int:
    """Count server errors, by the gateway's own counters, and episodes whose agent failed, in training or in an evaluation."""
    errors = sum(
        sample.value
        for sample in _samples(facts["metrics"])
        if sample.name == "headgate_errors_total" and sample.labels["status"] >= "500"
    )
    episodes = facts["status"]["episodes"]
    ended = {name.removeprefix(_CLOSED): n for name, n in episodes.items() if name.startswith(_CLOSED)}
    return int(errors) + failed(ended).total() + sum(evaluation["failed"] for evaluation in evaluations)


def abandoned_requests(metrics: str) -> int:
    """Call whose agent went away: the agents that are at work when the last update is done are stopped."""
    return int(
        sum(
            sample.value
            for sample in _samples(metrics)
            if sample.name == "headgate_calls_total" and sample.labels["finish"] == "abandoned"
        )
    )


def _samples(metrics: str) -> Iterator[Any]:
    for family in text_string_to_metric_families(metrics):
        yield from family.samples


def plot(path: Path, records: list[dict[str, Any]], summary: dict[str, Any], title: str) -> None:
    """Plot the reward by version, with the held-out reward before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    versions = [record["version"] for record in records]
    rewards = [record["reward_mean"] for record in records]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(versions, rewards, alpha=0.35, label="training batch, temperature 1")
    axes.plot(versions, smoothed(rewards), label="the same, smoothed")
    ends = [0, versions[-1]], [summary["reward_before"], summary["reward_after"]]
    axes.plot(*ends, "o", markersize=8, label=f"{summary['heldout_tasks']} held-out tasks, greedy")
    for version, reward in zip(*ends, strict=True):
        axes.annotate(
            f"{reward:.2f}", (version, reward), xytext=(0, 9), textcoords="offset points", ha="center"
        )
    axes.set(xlabel="version of the weights", ylabel="mean reward", ylim=(0, 1.05))
    control = " (control: frozen weights)" if summary["frozen"] else ""
    axes.set_title(f"{title}, seed {summary['seed']}{control}")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def smoothed(values: list[float]) -> list[float]:
    """Return an exponential moving average."""
    result: list[float] = []
    for value in values:
        result.append(value if not result else result[-1] + _SMOOTHING * (value - result[-1]))
    return result


def show(summary: dict[str, Any], directory: Path, console: Console) -> None:
    """Print the table, where to look next, and the summary as the last line."""
    table = Table(title="headgate demo")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in summary.items():
        if not isinstance(value, dict):
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    console.print(
        f"Look next at {directory}/reward.png, or run: tensorboard --logdir {directory}/trainer/tensorboard",
        soft_wrap=True,
    )
    console.file.write(json.dumps(summary) + "\n")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
