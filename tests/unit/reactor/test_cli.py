"""`scheduler graph` and `scheduler replay`, with toy programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import scheduler.program
from scheduler.cli import app
from scheduler.reactor import Program
from scheduler.reactor.draw import duration, mermaid, svg
from tests.unit.reactor.recordings import SPEC, limited, record
from tests.unit.reactor.toys import build, toy


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.program, "PROGRAMS", {"toy": toy, "control": toy})


def call(*arguments: object) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_folder_with_an_equal_recording(tmp_path: Path) -> None:
    record(tmp_path / "control.jsonl", {"restarts": 1}, late=True)
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
    assert lines[1] == "    0.000 s +1  fleet.commands   Do(e0 stop)"
    assert lines[2].strip() == "fleet.on_lost on fleet.lost: e0 ended with -9"
    assert any("1.000 s  fleet.commands" in line for line in lines)
    assert any("log.on_commands  missed its deadline" in line for line in lines)
    assert lines[-2] == "equal: 6 decisions were made again, bit for bit"


def test_a_recording_that_was_full_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    limited(path, 1200)
    status, output, _ = call("replay", path)
    assert status == 0
    assert output.splitlines()[-3] == "its recording ends at 1.000 s: it was full ([control] recording_mb)"
    assert json.loads(output.splitlines()[-1])["full"] == 1


def test_a_difference_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    lines = record(path)
    path.write_text("\n".join(line.replace("launch", "stop") for line in lines))
    status, output, _ = call("replay", path)
    assert status == 1
    assert json.loads(output.splitlines()[-1])["equal"] is False
    told = output.splitlines()[-4:-1]
    assert told[0] == "different, first at 1.000 s, microstep 0"
    assert "recorded" in told[1]
    assert '"step": "stop"' in told[1]
    assert "replayed" in told[2]
    assert '"step": "launch"' in told[2]


def test_a_changed_graph_is_said(tmp_path: Path) -> None:
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
            '{"format": 1, "program": "other", "settings": {}, "graph": "", "start": 0}',
            "no program 'other'; there are: bad, control, toy",
        ),
        (
            '{"format": 1, "program": "toy", "settings": {"restarts": []}, "graph": "", "start": "x"}',
            "no header",
        ),
        (
            '{"format": 1, "program": "bad", "settings": {}, "graph": "", "start": 0}',
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
    assert call("graph", "--program", "toy", "--out", tmp_path / "g.svg") == (0, "", "")
    assert (tmp_path / "g.svg").read_text() == svg(toy({}))
    status, _, errors = call("graph", "--program", "none")
    assert (status, errors.strip()) == (2, "no program 'none'; there are: control, toy")


@pytest.mark.parametrize("program", [toy({}), build(SPEC), Program("empty", []).seal()])
def test_the_svg_shows_everything_and_nothing_overlaps(program: Program) -> None:
    root = ElementTree.fromstring(svg(program))
    tag = "{http://www.w3.org/2000/svg}"
    words = [
        text.attrib.get("class", "") + ":" + "".join(text.itertext()) for text in root.iter(f"{tag}text")
    ]
    shown = "\n".join(words)
    for reactor in program.reactors:
        assert f"name:{reactor.name}" in words
        for element in reactor.elements.values():
            assert element.name in shown
        for reaction in reactor.reactions:
            assert f"dim:level {reaction.level}" in words
            assert (reaction.deadline is None) or f"late:deadline {duration(reaction.deadline)}" in words
    paths = [path.attrib for path in root.iter(f"{tag}path")]
    wires = [path for path in paths if path["class"].startswith("wire") and path["d"].count("V")]
    assert len(wires) == len(program.connections)
    delayed = [link for link in program.connections if link.after is not None]
    assert sum("delayed" in path["class"] for path in wires) == len(delayed)
    assert sum(word.startswith("label:") for word in words) == len(delayed)
    boxes = [
        [float(box.attrib[key]) for key in ("x", "y", "width", "height")]
        for box in root.iter(f"{tag}rect")
        if box.attrib["class"] == "box"
    ]
    for index, (x, y, width, height) in enumerate(boxes):
        assert x + width < float(root.attrib["width"])
        assert y + height < float(root.attrib["height"])
        for u, v, wide, high in boxes[:index]:
            assert x >= u + wide or u >= x + width or y >= v + high or v >= y + height


def test_who_hears_stands_to_the_right() -> None:
    picture = ElementTree.fromstring(svg(toy({})))
    boxes = [element.attrib for element in picture.iter() if element.attrib.get("class") == "box"]
    assert int(boxes[0]["x"]) + int(boxes[0]["width"]) < int(boxes[1]["x"])
    assert boxes[0]["y"] == boxes[1]["y"]


def test_mermaid_shows_everything() -> None:
    text = mermaid(toy({}))
    for line in (
        "  subgraph fleet",
        '    fleet_e_lost{{"lost<br/>physical"}}',
        '    log_r_on_commands["1 on_commands<br/>level 2, deadline 5 ms"]',
        "    fleet_e_lost --> fleet_r_on_lost",
        "    fleet_r_on_lost --> fleet_e_commands",
        "  fleet_e_commands ==> log_e_commands",
    ):
        assert line in text.splitlines()
    assert '== "next microstep" ==>' in mermaid(build(SPEC))
    assert '== "after 1 ns" ==>' in mermaid(build(SPEC))


def test_durations() -> None:
    assert [duration(ns) for ns in (2_000_000_000, 250_000_000, 1_500)] == ["2 s", "250 ms", "1500 ns"]
