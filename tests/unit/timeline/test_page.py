"""The page and the command: what they say is what the timeline says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scheduler.cli import app
from scheduler.policies.staleness_events import Consume, Leased
from scheduler.program.calls import Opened, Placed
from scheduler.timeline import Step, Timeline, page, stretches
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
        (["{run}", "--model", "ghost"], "no model ghost"),
        (["{run}", "--metrics", "{run}/control.jsonl"], "no record of a trainer"),
        (["{run}", "--metrics", "ghost={run}/metrics.jsonl"], "no model ghost"),
    ],
)
def test_what_cannot_be_told_is_refused(run: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["timeline", *(argument.format(run=run) for argument in arguments)])
    assert result.exit_code == 2
    assert said in result.output
