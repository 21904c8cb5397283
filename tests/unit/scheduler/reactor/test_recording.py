"""Recordings: their lines, what a kill leaves of them, and their replay."""

from __future__ import annotations

import base64
import errno
import json
import os
import pickle
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from scheduler.reactor import (
    MILLISECOND,
    SECOND,
    BadRecording,
    Limit,
    Program,
    Recording,
    ReplayReport,
    Runtime,
    Tag,
    VirtualClock,
    replay,
)
from scheduler.reactor.reading import read
from scheduler.reactor.recording import Decision, Event, Full, build, earlier, line
from scheduler.reactor.snapshot import BadState
from tests.unit.scheduler.reactor.recordings import limited, record
from tests.unit.scheduler.reactor.toys import Again, Fleet, Log, Lost, toy


def test_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "control.jsonl"
    lines = [json.loads(line) for line in record(path, {"restarts": 1})]
    digest = toy({}).digest()
    stop = {"engine": "e0", "step": "stop"}
    assert lines[:4] == [
        {
            "format": 6,
            "program": "toy",
            "settings": {"restarts": 1},
            "graph": digest,
            "start": 1000,
            "build": build(),
            "state": None,
        },
        {"tag": [1000, 1], "action": "fleet.lost", "type": "Lost", "value": {"engine": "e0", "code": -9}},
        {
            "tag": [1000, 1],
            "port": "fleet.commands",
            "type": "Do",
            "value": [stop],
            "reaction": "fleet.on_lost",
            "triggers": ["fleet.lost"],
            "why": "e0 ended with -9",
        },
        {
            "tag": [1000, 1],
            "port": "log.count",
            "type": "int",
            "value": 1,
            "reaction": "log.on_commands",
            "triggers": ["log.commands"],
            "why": "",
        },
    ]
    assert [line["value"] for line in lines if line.get("port") == "log.count"] == [1, 2, 3]
    assert lines[-1] == {"tag": [2 * SECOND, 0], "end": True}


def test_a_decision_is_on_disk_before_observers_receive_it(tmp_path: Path) -> None:
    path = tmp_path / "control.jsonl"
    program = toy({})
    fleet = program.reactors[0]
    assert isinstance(fleet, Fleet)
    runtime = Runtime(program, VirtualClock(), Recording.open(path, {}))
    seen: list[int] = []
    runtime.observe(fleet.commands, lambda tag, value: seen.append(len(path.read_text().splitlines())))
    runtime.start()
    assert len(path.read_text().splitlines()) == 1
    runtime.inject(fleet.lost, Lost("e0"))
    assert len(path.read_text().splitlines()) == 1
    runtime.advance()
    assert seen == [4]


@pytest.mark.parametrize("close", [False, True])
def test_a_run_replays(tmp_path: Path, close: bool) -> None:
    report = replay_lines(record(tmp_path / "r", {"restarts": 1}, close))
    assert (report.equal, report.events, report.decisions, report.graph_changed) == (True, 2, 6, False)


def replay_lines(lines: list[str], build: Any = toy) -> ReplayReport:
    return replay(lines, build)


def test_a_recording_holds_several_runs_and_each_has_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, {"restarts": 0})
    record(path, {"restarts": 1}, close=False)
    record(path)
    report = replay(path, toy)
    assert [len(run.decisions) for run in report.runs] == [4, 6, 6]
    assert (len(report.runs), report.equal, report.events, report.decisions) == (3, True, 6, 16)


@pytest.mark.parametrize("field", ["port", "value", "reaction", "triggers", "why", "tag"])
def test_a_changed_decision_is_found(tmp_path: Path, field: str) -> None:
    lines = record(tmp_path / "r")
    changed = json.loads(lines[5])
    assert changed["tag"] == [SECOND + 1000, 0]
    changed[field] = {"tag": [SECOND + 1000, 1], "triggers": ["log.other"]}.get(field, "other")
    difference = replay_lines([*lines[:5], json.dumps(changed), *lines[6:]]).difference
    assert difference is not None
    assert difference.tag == Tag(SECOND + 1000)
    assert difference.recorded == changed
    assert difference.replayed == json.loads(lines[5])


@pytest.mark.parametrize("index", [2, 4, 8])
def test_a_missing_and_a_surplus_decision_are_found(tmp_path: Path, index: int) -> None:
    lines = record(tmp_path / "r")
    assert '"port"' in lines[index]
    assert not replay_lines([*lines[:index], *lines[index + 1 :]]).equal
    assert not replay_lines([*lines[: index + 1], *lines[index:]]).equal


def test_what_a_closed_run_would_decide_later_does_not_count_but_what_it_did_not_does(tmp_path: Path) -> None:
    """A timer was pending when it was closed. A program with a shorter one would have decided more by then."""
    lines = record(tmp_path / "r", {"restarts": 9})
    assert replay_lines(lines).equal

    class Hasty(Fleet):
        def _on_lost(self, now: Any) -> None:
            super()._on_lost(now)
            now.schedule(self.again, Again("e9"), after=500 * MILLISECOND)

    def hasty(settings: dict[str, Any]) -> Program:
        fleet, log = Hasty(9), Log()
        program = Program("toy", [fleet, log])
        program.connect(fleet.commands, log.commands)
        return program.seal()

    report = replay_lines(lines, hasty)
    assert not report.graph_changed
    assert report.difference is not None
    assert report.difference.tag == Tag(1000 + 500 * MILLISECOND)


def test_a_changed_graph_is_reported_and_what_it_cannot_receive_is_a_difference(tmp_path: Path) -> None:
    lines = record(tmp_path / "r")

    def alone(settings: dict[str, Any]) -> Program:
        return Program("toy", [Log()]).seal()

    report = replay_lines(lines, alone)
    assert report.graph_changed
    assert report.difference is not None
    assert report.difference.note == "no physical action fleet.lost"
    report = replay_lines([line.replace('"code":-9', '"code":"?"') for line in lines])
    assert not report.graph_changed
    assert report.difference is not None
    assert report.difference.note.startswith("fleet.lost: Expected `int`")


def test_a_run_that_failed_fails_again(tmp_path: Path) -> None:
    program = toy({})
    fleet = program.reactors[0]
    assert isinstance(fleet, Fleet)
    recording = Recording.open(tmp_path / "r", {})
    runtime = Runtime(program, VirtualClock(), recording)
    runtime.start()
    runtime.inject(fleet.lost, Lost("e0"))
    runtime.inject(fleet.lost, Lost("e1", 99))
    with pytest.raises(RuntimeError, match="no such engine"):
        runtime.advance()
    recording.close()
    report = replay(tmp_path / "r", toy)
    assert report.equal
    failure = report.runs[0].failure
    assert failure is not None
    assert (failure.tag, failure.reaction, failure.error) == (Tag(0, 2), "fleet.on_lost", "RuntimeError")
    healed = (tmp_path / "r").read_text().replace("99", "98").splitlines()
    assert not replay_lines(healed).equal


# What a kill leaves


def test_appending_to_a_cut_line_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, close=False)
    whole = path.read_text()
    path.write_text(whole[:-20])
    record(path)
    assert path.read_text().startswith(whole[:-20] + "\n{")
    report = replay(path, toy)
    assert (len(report.runs), report.equal, report.decisions) == (2, True, 11)


def test_only_the_last_tag_of_a_killed_run_may_lack_decisions(tmp_path: Path) -> None:
    lines = record(tmp_path / "r", close=False)[:7]
    assert '"action"' in lines[6]
    assert replay_lines(lines).equal
    assert not replay_lines([*lines[:5], lines[6]]).equal


def test_a_line_damaged_elsewhere_is_refused(tmp_path: Path) -> None:
    lines = record(tmp_path / "r")
    with pytest.raises(BadRecording, match="line 3 is not a JSON object"):
        read([*lines[:2], lines[2][:-5], *lines[3:]])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no run"),
        (["hello"], "line 1 is not a JSON object"),
        (['{"tag": [0, 0], "end": true}'], "before any header"),
        (['{"format": 3}'], "format 3"),
        (['{"format": 5, "program": "p"}'], "not a header"),
        (['{"format": 5, "program": "p", "settings": {}, "graph": "", "start": 0}', '{"tag": 5}'], "line 2"),
        (
            ['{"format": 5, "program": "p", "settings": {}, "graph": "", "start": 0}', '{"tag": [0, 0]}'],
            "line 2",
        ),
    ],
)
def test_what_is_not_a_recording_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(BadRecording, match=message):
        read(lines)


def test_lines_become_what_they_were(tmp_path: Path) -> None:
    lines = record(tmp_path / "r")
    run = read(tmp_path / "r")[0]
    assert [json.dumps(entry.to_json(), separators=(",", ":")) for entry in run.entries] == lines[1:]
    assert {type(entry) for entry in run.entries} >= {Event, Decision}


def test_settings_that_are_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Recording.open(tmp_path / "r", {"path": tmp_path})
    assert not (tmp_path / "r").exists()


# Files that are full


def test_a_run_goes_on_in_a_new_file_and_the_last_two_replay(tmp_path: Path) -> None:
    path, whole = tmp_path / "r", tmp_path / "whole"
    assert limited(path, 700, 12) == limited(whole, 10**9, 12)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r", "r.1", "whole"]
    assert 700 <= earlier(path).stat().st_size < 2_500
    runs, entries = read(path), read(whole)[0].entries
    assert [run.header.state is not None for run in runs] == [True, True]
    (last, size), first = (runs[0].entries[-1].tag, runs[0].entries[-1]), runs[0].entries[0]
    assert size == Full(last, earlier(path).stat().st_size - len(line(size)) - 1)
    kept = [entry for run in runs for entry in run.entries if not isinstance(entry, Full)]
    assert len(kept) < len(entries)
    assert kept == entries[entries.index(first) :]
    report = replay(path, toy)
    assert (report.equal, report.graph_changed) == (True, False)
    assert not replay_lines([line(runs[0].header), *map(line, runs[0].entries[1:])]).equal


def test_a_process_that_is_killed_while_it_begins_a_file_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r"
    limited(path, 700, 12)
    before = replay(earlier(path), toy).runs[0].run.entries
    begun = path.read_text()
    for kept in (None, "", begun[:300], begun.split("\n")[0] + "\n"):
        path.unlink(missing_ok=True)
        if kept is not None:
            path.write_text(kept)
        assert replay(path, toy).equal
        assert read(path)[0].entries == before
        record(path)
        report = replay(path, toy)
        assert report.equal
        assert (report.runs[0].run.entries, report.runs[-1].events) == (before, 2)


@pytest.mark.parametrize(
    ("size", "seconds", "full"),
    [(99, 1e9, False), (100, 59, False), (100, 60, True), (399, 59, False), (400, 0, True)],
)
def test_a_file_has_its_seconds_unless_it_has_four_times_its_size(
    size: int, seconds: float, full: bool
) -> None:
    assert Limit(100, kept_s=60).reached(size, seconds) is full


def test_a_state_names_no_class_but_those_of_its_program(tmp_path: Path) -> None:
    limited(tmp_path / "r", 700)
    header, *lines = (tmp_path / "r").read_text().splitlines()

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    for state, message in ((pickle.dumps(Harm()), "posix.mkdir is not a state"), (b"?", "does not fit")):
        changed = json.loads(header) | {"state": base64.b64encode(state).decode()}
        with pytest.raises(BadState, match=message):
            replay_lines([json.dumps(changed), *lines])
    assert not (tmp_path / "harm").exists()


class FullDisk(FileIO):
    """Accepts `room` bytes, and then the beginning of a write."""

    room = 1000

    def write(self, data: Any) -> int:
        left = self.room - os.fstat(self.fileno()).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(bytes(data)[:left])


def test_a_program_goes_on_when_its_recording_cannot_be_written(tmp_path: Path) -> None:
    """The disk is full: what is recorded is whole up to some tag, and replays."""
    path, lost, seen = tmp_path / "r", list[OSError](), list[Any]()
    program = toy({})
    fleet, log = program.reactors
    assert isinstance(fleet, Fleet) and isinstance(log, Log)
    recording = Recording(FullDisk(path, "a+"), {}, on_lost=lost.append)
    runtime = Runtime(program, VirtualClock(), recording)
    runtime.observe(log.count, lambda _, value: seen.append(value))
    runtime.start()
    for number in range(30):
        runtime.inject(fleet.lost, Lost(f"e{number}"))
        runtime.run_until(number * SECOND)
    recording.close()
    assert [error.errno for error in lost] == [errno.ENOSPC]
    assert (seen, recording.ended) == (limited(tmp_path / "whole", 10**9, 30), True)
    assert 0 < path.stat().st_size <= FullDisk.room
    assert path.read_bytes().endswith(b"}\n")
    assert replay(path, toy).equal
