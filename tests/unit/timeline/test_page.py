"""The page and the command: what they say is what the timeline says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scheduler.cli import app
from scheduler.policies.staleness_events import Consume, Leased
from scheduler.program.calls import Opened, Placed
from scheduler.timeline import Step, Timeline, page, report, stretches
from tests.unit.timeline.story import leaves, recorded


def test_the_page_holds_the_whole_timeline_and_nothing_ends_it_early() -> None:
    steps = (Step(0, 2.0),)
    intervals = tuple(stretches("</script><b>", [(1.0, "rollout")], 0.0, 4.0, steps))
    html = page.page(Timeline(0.0, 4.0, intervals, steps), "a & b </title>")
    body = html.partition('type="application/json">')[2]
    text, _, rest = body.partition("</script>")
    data = json.loads(text)
    assert (html.count("<script"), html.count("</script>")) == (2, 2)
    assert "http" not in html.replace("http-equiv", "")  # nothing is fetched
    assert data["title"] == "a & b </title>"
    assert data["nodes"] == [
        {"name": "</script><b>", "bars": [[3, 0.0, 1.0, 0], [0, 1.0, 2.0, 0], [0, 2.0, 4.0, 1]]}
    ]
    assert data["seconds"] == [["</script><b>", 3.0, 0.0, 0.0, 1.0]]
    assert "JSON.parse" in rest


def test_more_nodes_than_can_be_drawn_are_counted() -> None:
    nodes = [f"n{i:04}" for i in range(page.MOST_NODES + 5)]
    intervals = tuple(i for node in nodes for i in stretches(node, [(0.0, "train")], 0.0, 1.0, ()))
    html = page.page(Timeline(0.0, 1.0, intervals), "many")
    data = json.loads(html.partition('type="application/json">')[2].partition("</script>")[0])
    assert (len(data["nodes"]), len(data["seconds"])) == (page.MOST_NODES, page.MOST_NODES + 5)
    assert f"{page.MOST_NODES + 5} nodes" in data["about"]
    assert f"first {page.MOST_NODES} nodes are drawn" in data["about"]


def data_of(timeline: Timeline) -> dict[str, Any]:
    """The JSON data embedded in the page."""
    html = page.page(timeline, "t")
    found: dict[str, Any] = json.loads(
        html.partition('type="application/json">')[2].partition("</script>")[0]
    )
    return found


def test_when_a_part_of_a_run_began_is_told_and_that_all_nodes_are_drawn() -> None:
    nodes = [f"n{i:04}" for i in range(page.MOST_NODES)]
    intervals = tuple(i for node in nodes for i in stretches(node, [(60.0, "train")], 60.0, 64.0, ()))
    about = data_of(Timeline(60.0, 64.0, intervals, (), frozenset(), 1000.0))["about"]
    assert about == f"{page.MOST_NODES} nodes, 4.0 s, 0 steps. It began at 1970-01-01 00:17:40 UTC."
    one = tuple(stretches("n", [], 0.0, 1.0, ()))
    assert data_of(Timeline(0.0, 1.0, one))["about"] == "1 node, 1.0 s, 0 steps. In virtual time."


def test_the_tiles_are_shares_of_the_nodes_that_they_name() -> None:
    steps = (Step(0, 4.0), Step(1, 10.0))
    told = {"r": [(0.0, "rollout"), (9.0, "idle")], "t": [(2.0, "train"), (7.0, "idle")]}
    intervals = tuple(i for node, at in told.items() for i in stretches(node, at, 0.0, 10.0, steps))  # type: ignore[arg-type]
    data = data_of(Timeline(0.0, 10.0, intervals, steps, frozenset("t")))
    assert dict(data["tiles"]) == {
        "idle, all nodes": "30.0%",
        "idle, train nodes": "50.0%",
        "idle, other nodes": "10.0%",
        "train nodes idle, a step": "2.50 s",
    }
    assert data["nodes"][1]["bars"] == [
        [3, 0.0, 2.0, 0],
        [1, 2.0, 4.0, 0],
        [1, 4.0, 7.0, 1],
        [3, 7.0, 10.0, 1],
    ]


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
    lines = [runs[0].header.to_json(), *(entry.to_json() for entry in runs[0].entries)]
    (tmp_path / "control.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [
        {"time": 1000 + at + 1.0, "buffer": n, "spans": [["compute", 1000.0 + at, 1001.0 + at]]}
        for n, at in enumerate((4, 8))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_command_tells_the_figures_and_draws(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["timeline", str(run), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output.splitlines()[-1])
    assert said["nodes"] == {
        "e": {"rollout": 3.0, "train": 0.0, "switching": 0.0, "idle": 7.0},
        "trainer": {"rollout": 0.0, "train": 2.0, "switching": 0.0, "idle": 8.0},
    }
    assert (said["steps"], said["train_nodes"], said["idle_train"], said["idle"]) == (
        2,
        ["trainer"],
        0.8,
        0.75,
    )
    assert (said["bubble_train_s"], said["bubble_rollout_s"]) == (3.5, 3.0)  # (4 + 3) / 2, (2 + 4) / 2
    assert "engine" not in Path(said["html"]).read_text().partition("<script")[0]
    assert Path(said["png"]).read_bytes().startswith(b"\x89PNG")


def test_only_the_steps(run: Path) -> None:
    result = CliRunner().invoke(app, ["timeline", str(run), "--steps"])
    assert (
        json.loads(result.output.splitlines()[-1])["seconds"] == 8.0
    )  # from the first call to the last step's end


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "No such file"),
        (["{run}", "--number", "2"], "--number 2"),
        (["{run}", "--number", "0"], "--number"),
        (["{run}", "--model", "ghost"], "no model ghost"),
        (["{run}", "--metrics", "{run}/control.jsonl"], "no record of a trainer"),
        (["{run}", "--metrics", "ghost={run}/metrics.jsonl"], "no model ghost"),
    ],
)
def test_what_cannot_be_told_is_refused(run: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["timeline", *(argument.format(run=run) for argument in arguments)])
    assert result.exit_code == 2
    assert said in result.output


def said_of(*arguments: str) -> dict[str, Any]:
    """The figures of `scheduler timeline`."""
    result = CliRunner().invoke(app, ["timeline", *arguments])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output.splitlines()[-1])
    return found


def test_a_recording_by_itself_has_its_trainers_file_beside_it_unless_another_is_named(run: Path) -> None:
    recording, beside = str(run / "control.jsonl"), run / "metrics.jsonl"
    assert said_of(recording)["nodes"]["trainer"]["train"] == 2.0
    other = run / "other.jsonl"
    record = {"time": 1009.0, "buffer": 1, "spans": [["compute", 1002.0, 1002.5]]}
    other.write_text(json.dumps(record) + "\n")
    for named in (f"actor={other}", str(other)):
        assert said_of(recording, "--metrics", named)["nodes"]["trainer"]["train"] == 0.5
    beside.rename(run / "away.jsonl")
    assert said_of(recording)["nodes"]["trainer"]["train"] == 0.0


def test_one_of_a_recordings_runs_can_be_named(run: Path) -> None:
    path = run / "control.jsonl"
    later = recorded((0, Opened("other", 0)), until=3)
    path.write_text(
        path.read_text()
        + "".join(
            json.dumps(line) + "\n"
            for line in (later[0].header.to_json(), *(e.to_json() for e in later[0].entries))
        )
    )
    (run / "metrics.jsonl").unlink()
    assert set(said_of(str(run), "--number", "1")["nodes"]) == {"e", "trainer"}
    assert set(said_of(str(run), "--number", "2")["nodes"]) == {"other"}


def test_the_steps_begin_with_whatever_a_node_did_first() -> None:
    steps = (Step(0, 8.0),)
    told = {"r": [(4.0, "rollout")], "t": [(2.0, "train"), (3.0, "idle")]}
    intervals = tuple(i for node, at in told.items() for i in stretches(node, at, 0.0, 10.0, steps))  # type: ignore[arg-type]
    part = report.in_steps(Timeline(0.0, 10.0, intervals, steps))
    assert (part.start_s, part.end_s) == (2.0, 8.0)
    with pytest.raises(ValueError, match="no step has ended"):
        report.in_steps(Timeline(0.0, 10.0, intervals))
