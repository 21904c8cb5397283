"""`scheduler graph` and `scheduler replay`, with toy programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import scheduler.program
from scheduler.cli import app
from scheduler.reactor import Program
from scheduler.reactor.draw import duration, markdown, mermaid
from scheduler.reactor.recording import build as build_name
from tests.unit.scheduler.reactor.recordings import SPEC, limited, record
from tests.unit.scheduler.reactor.toys import build, toy


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.program, "PROGRAMS", {"toy": toy, "control": toy})


def call(*arguments: object) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_folder_with_an_equal_recording(tmp_path: Path) -> None:
    record(tmp_path / "control.jsonl", {"restarts": 1})
    status, output, _ = call("replay", tmp_path)
    lines = output.splitlines()
    assert status == 0
    assert json.loads(lines[-1]) == {
        "runs": 1,
        "events": 2,
        "decisions": 6,
        "equal": True,
        "graph_changed": False,
        "full": 0,
    }
    assert lines[0] == "run 1 of 1: toy, 2 events from outside"
    assert lines[1] == "    0.000 s +1  fleet.commands  Do(e0 stop)"
    assert lines[2].strip() == "fleet.on_lost on fleet.lost: e0 ended with -9"
    assert any("1.000 s  fleet.commands" in line for line in lines)
    assert lines[-2] == "equal: 6 decisions were made again, bit for bit"


def test_a_full_recording_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    limited(path, 1200)
    status, output, _ = call("replay", path)
    assert status == 0
    lines = output.splitlines()
    assert "the file ends at 2.000 s: it was full" in lines
    assert "run 2 of 2: toy, 1 events from outside, it goes on from an earlier file" in lines
    assert json.loads(lines[-1])["full"] == 1


def test_a_recording_of_another_build_reports_it_and_replays(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    header, *lines = record(path)
    for changes, name in (
        ({"build": "0.1.0, abc"}, "0.1.0, abc"),
        ({"format": 5}, "a build that did not report itself"),
    ):
        changed = {**json.loads(header), "build": "", **changes}
        path.write_text("\n".join([json.dumps(changed), *lines]))
        status, output, _ = call("replay", path)
        assert status == 0
        assert output.splitlines()[1] == f"recorded by {name}; this is {build_name()}"


def test_a_difference_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    lines = record(path)
    path.write_text("\n".join(line.replace("launch", "stop") for line in lines))
    status, output, _ = call("replay", path)
    assert status == 1
    assert json.loads(output.splitlines()[-1])["equal"] is False
    lines = output.splitlines()[-4:-1]
    assert lines[0] == "different, first at 1.000 s, microstep 0"
    assert "recorded" in lines[1]
    assert '"step": "stop"' in lines[1]
    assert "replayed" in lines[2]
    assert '"step": "launch"' in lines[2]


def test_a_changed_graph_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(record(path)).replace(toy({}).digest(), "0" * 64))
    status, output, _ = call("replay", path)
    assert status == 0
    assert "the graph has changed since" in output
    assert json.loads(output.splitlines()[-1])["graph_changed"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("", "no run in it"),
        ("hello\n", "line 1 is not a JSON object"),
        (
            '{"format": 5, "program": "other", "settings": {}, "graph": "", "start": 0}',
            "no program 'other'; there are: bad, control, toy",
        ),
        (
            '{"format": 5, "program": "toy", "settings": {"restarts": []}, "graph": "", "start": "x"}',
            "not a header",
        ),
        (
            '{"format": 5, "program": "bad", "settings": {}, "graph": "", "start": 0}',
            "settings build no program",
        ),
    ],
)
def test_a_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str) -> None:
    def bad(settings: dict[str, Any]) -> Program:
        raise KeyError("models")

    monkeypatch.setattr(scheduler.program, "PROGRAMS", {"control": toy, "toy": toy, "bad": bad})
    path = tmp_path / "r.jsonl"
    if text is not None:
        path.write_text(text)
    status, output, errors = call("replay", path)
    assert status == 2
    assert message in errors
    assert str(path) in errors or "there are" in errors
    assert output == ""


# Pictures


def test_the_graph_goes_to_the_output_or_a_file(tmp_path: Path) -> None:
    assert call("graph", "--format", "mermaid")[1] == mermaid(toy({}))
    assert call("graph", "--program", "toy", "--out", tmp_path / "g.md") == (0, "", "")
    assert (tmp_path / "g.md").read_text() == markdown(toy({}))
    status, _, errors = call("graph", "--program", "none")
    assert (status, errors.strip()) == (2, "no program 'none'; there are: control, toy")


def test_the_diagram_has_an_arrow_for_every_connection() -> None:
    assert mermaid(toy({})).splitlines() == [
        "flowchart LR",
        "  outside([events from outside])",
        "  fleet[fleet]",
        "  log[log]",
        '  outside -->|"lost"| fleet',
        '  fleet ==>|"commands"| log',
    ]


def test_connections_of_two_reactors_share_an_arrow_unless_their_delays_differ() -> None:
    program = build({**SPEC, "links": [*SPEC["links"], [1, 5, None]]})
    drawn = "\n".join(line for line in mermaid(program).splitlines() if "==>" in line or "-.->" in line)
    ways = {(link.source.reactor, link.target.reactor, link.after) for link in program.connections}
    assert len(drawn.splitlines()) == len(ways) < len(program.connections)
    for link in program.connections:
        assert f"{link.source.name} to {link.target.name}" in drawn
    assert "<br/>(next microstep)" in drawn
    assert "<br/>(after 1 ns)" in drawn


def test_the_page_has_a_row_for_every_reaction() -> None:
    page = markdown(toy({}))
    assert f"```mermaid\n{mermaid(toy({}))}```" in page
    assert "## fleet\n\n| level | reaction | runs on | writes |\n" in page
    for row in (
        "| 0 | `on_lost` | **lost** | commands, *again* |",
        "| 1 | `on_again` | *again* | commands |",
        "| 2 | `on_commands` | commands | count |",
    ):
        assert row in page.splitlines()


def test_durations() -> None:
    assert [duration(ns) for ns in (2_000_000_000, 250_000_000, 1_500)] == ["2 s", "250 ms", "1500 ns"]
