"""The files of a run: its recording, and the metrics of its trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler.planning.recorded import BadMetrics, TrainerRecord, read_metrics, slugs_of, timeline_of
from scheduler.planning.timeline import Timeline
from scheduler.reactor.reading import BadRecording, Run, read
from scheduler.reactor.snapshot import BadState

RECORDING = "control.jsonl"
METRICS = ("trainer/metrics.jsonl", "metrics.jsonl")
"""The places of the trainer's metrics in a run's folder."""


class BadRun(Exception):
    """A run without a usable recording; the message has the cause."""


def runs_of(run: Path, number: int | None = None) -> list[Run]:
    """Return the runs of a recording, or of the one in a folder. Raise BadRun.

    `number`: only this run of the recording, counted from 1.
    """
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


def timeline_from(run: Path, number: int | None = None, metrics: Sequence[str] = ()) -> Timeline:
    """Return the timeline of a recording, or of the one in a folder. Raise BadRun.

    `metrics`: files as FILE or MODEL=FILE, in place of those in the folder.
    """
    runs = runs_of(run, number)
    try:
        return timeline_of(runs, _records(run, runs, metrics))
    except (OSError, BadMetrics, BadState) as error:
        raise BadRun(str(error)) from error
    except ValueError as error:
        raise BadRun(f"{run}: {error}") from error


def figures_from(
    run: Path, number: int | None = None, metrics: Sequence[str] = ()
) -> Sequence[Mapping[str, float]]:
    """Return the figures of each step of the trainer that has most of them. Raise as `timeline_from`, which has read it."""
    records = _records(run, runs_of(run, number), metrics)
    return max((one.figures for one in records.values()), key=len, default=())


def _records(run: Path, runs: Sequence[Run], given: Sequence[str]) -> dict[str, TrainerRecord]:
    """Read the trainers' metrics. A file without a model belongs to the first model that has a ledger."""
    trained = [m for one in runs for m, of in one.header.settings.get("models", {}).items() if "ledger" in of]
    default = next(iter([*trained, *slugs_of(runs)]), "")
    folder = run if run.is_dir() else run.parent
    files: dict[str, Path] = {}
    for text in given:
        model, _, name = text.rpartition("=")
        files[model or default] = Path(name)
    if not given and (path := next((folder / m for m in METRICS if (folder / m).exists()), None)):
        files[default] = path
    return {model: read_metrics(path) for model, path in files.items()}
