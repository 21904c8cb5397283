"""The command `scheduler timeline`: finds the files of a run, makes its timeline, and reports its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scheduler.reactor.recording import BadRecording, Run, read
from scheduler.timeline.intervals import KINDS, Timeline
from scheduler.timeline.recorded import BadMetrics, Written, read_metrics, slugs_of, timeline_of

RECORDING = "control.jsonl"
METRICS = ("trainer/metrics.jsonl", "metrics.jsonl")
"""The places of the trainer's metrics in a run's folder."""


class BadRun(Exception):
    """No timeline can be made of it; the message says why."""


def runs_of(run: Path, number: int | None = None) -> list[Run]:
    """The runs of a recording, or of the one in a folder; only one of them, if its number (from 1) is given. Raises BadRun."""
    path = run / RECORDING if run.is_dir() else run
    try:
        runs = read(path)
    except (OSError, BadRecording) as error:
        raise BadRun(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if number is None:
        return runs
    if not 1 <= number <= len(runs):
        raise BadRun(f"--number {number}: {path} has {len(runs)} run{'s' if len(runs) > 1 else ''}")
    return [runs[number - 1]]


def written_of(run: Path, runs: Sequence[Run], given: Sequence[str] = ()) -> dict[str, Written]:
    """Reads the trainers' records: `given` files, each `FILE` or `MODEL=FILE`, else those in the folder. Raises BadRun.
    A file without a model belongs to the first model that has a ledger."""
    slugs = slugs_of(runs)
    trained = [m for run in runs for m, of in run.header.settings.get("models", {}).items() if "ledger" in of]
    default = next(iter([*trained, *slugs]), "")
    folder = run if run.is_dir() else run.parent
    found: dict[str, Path] = {}
    for text in given:
        model, _, name = text.rpartition("=")
        found[model or default] = Path(name)
    if not given and (path := next((folder / m for m in METRICS if (folder / m).exists()), None)):
        found[default] = path
    try:
        return {model: read_metrics(path) for model, path in found.items()}
    except (OSError, BadMetrics) as error:
        raise BadRun(str(error)) from error


def timeline_from(
    run: Path,
    number: int | None = None,
    metrics: Sequence[str] = (),
    model: str | None = None,
    steps: bool = False,
) -> Timeline:
    """A run's timeline; with `steps` only from the first lease of a batch to the end of the last step. Raises BadRun."""
    runs = runs_of(run, number)
    try:
        timeline = timeline_of(runs, written_of(run, runs, metrics), model)
        return in_steps(timeline) if steps else timeline
    except ValueError as error:
        raise BadRun(f"{run}: {error}") from error


def in_steps(timeline: Timeline) -> Timeline:
    """Without the time before any node was awake, and after the last step. Raises ValueError if no step ended."""
    if not timeline.steps:
        raise ValueError("no step has ended in it")
    awake = (i.start_s for i in timeline.intervals if i.kind in ("rollout", "train"))
    return timeline.within(min(awake, default=timeline.start_s), timeline.steps[-1].end_s)


def rows(timeline: Timeline) -> Iterator[tuple[str, ...]]:
    """The table of a terminal: a line a node, and their sum."""
    by_kind = timeline.by_kind()
    sums = {kind: sum(seconds[kind] for seconds in by_kind.values()) for kind in KINDS}
    for name, seconds in [*by_kind.items(), ("all", sums)]:
        whole = sum(seconds.values())
        share = f"{seconds['idle'] / whole:.1%}" if whole else "-"
        yield (name, *(f"{seconds[kind]:.1f}" for kind in KINDS), share)


def summary(timeline: Timeline) -> dict[str, Any]:
    """The figures as JSON: shares are of the nodes' time, seconds are sums over nodes."""
    train = [node for node in timeline.nodes if node in timeline.train_nodes]
    others = [node for node in timeline.nodes if node not in timeline.train_nodes]
    bubbles = timeline.bubbles()
    count = max(1, len(bubbles))
    return {
        "seconds": round(timeline.seconds, 3),
        "nodes": {
            node: {kind: round(value, 3) for kind, value in seconds.items()}
            for node, seconds in timeline.by_kind().items()
        },
        "train_nodes": train,
        "steps": len(timeline.steps),
        "idle": _share(timeline, [*train, *others]),
        "idle_train": _share(timeline, train),
        "idle_rollout": _share(timeline, others),
        "bubble_train_s": round(sum(b.train_s for b in bubbles) / count, 3),
        "bubble_rollout_s": round(sum(b.rollout_s for b in bubbles) / count, 3),
    }


def _share(timeline: Timeline, nodes: Sequence[str]) -> float | None:
    share = timeline.share("idle", nodes)
    return None if share is None else round(share, 4)
