"""The files of a run, as `scheduler plan --run` finds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.planning.runs import BadRun, timeline_from
from scheduler.policies.staleness_events import Consume, Leased
from scheduler.program.calls import Opened, Placed
from scheduler.reactor.reading import Run
from tests.unit.scheduler.planning.story import leaves, recorded


def lines_of(runs: list[Run]) -> str:
    """Return the lines of a recording's file."""
    lines = [line for run in runs for line in (run.header.to_json(), *(e.to_json() for e in run.entries))]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder: an engine that samples for 3 s, a trainer that computes for 1 s in each of two steps."""
    runs = recorded(
        (0, Opened("e", 0)),
        (1, Placed("a", "e")),
        (1, Leased(0)),
        (4, leaves("a")),
        (5, Consume(0)),
        (9, Consume(1)),
        until=10,
    )
    (tmp_path / "control.jsonl").write_text(lines_of(runs))
    records = [
        {"time": 1000 + at + 1.0, "batch": n, "spans": [["compute", 1000.0 + at, 1001.0 + at]]}
        for n, at in enumerate((4, 8))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "number", "metrics", "message"),
    [
        ("nowhere", None, (), "No such file"),
        (".", 2, (), "--number 2: .* has 1 run$"),
        (".", 0, (), "--number"),
        (".", None, ("{run}/nowhere",), "No such file"),
        (".", None, ("{run}/control.jsonl",), "is not a record of a trainer"),
        (".", None, ("ghost={run}/metrics.jsonl",), "no model ghost"),
    ],
)
def test_an_unusable_run_is_refused(
    run: Path, path: str, number: int | None, metrics: tuple[str, ...], message: str
) -> None:
    with pytest.raises(BadRun, match=message):
        timeline_from(run / path, number, [one.format(run=run) for one in metrics])


def test_the_metrics_are_those_in_the_folder_unless_others_are_named(run: Path) -> None:
    recording = run / "control.jsonl"

    def trained_s(*metrics: str) -> float:
        return timeline_from(recording, metrics=metrics).by_kind()["trainer"]["train"]

    assert trained_s() == 2.0
    other = run / "other.jsonl"
    record = {"time": 1009.0, "batch": 1, "spans": [["compute", 1002.0, 1002.5]]}
    other.write_text(json.dumps(record) + "\n")
    assert trained_s(f"actor={other}") == trained_s(str(other)) == 0.5
    (run / "metrics.jsonl").unlink()
    assert trained_s() == 0.0


def test_one_run_of_a_recording_can_be_named(run: Path) -> None:
    path = run / "control.jsonl"
    path.write_text(path.read_text() + lines_of(recorded((0, Opened("other", 0)), until=3)))
    (run / "metrics.jsonl").unlink()
    assert timeline_from(run, 1).nodes == ("e", "trainer")
    assert timeline_from(run, 2).nodes == ("other",)
