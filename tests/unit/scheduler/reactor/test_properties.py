"""Random programs under random events: order, determinism, replay."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from scheduler.reactor import Limit, Program, Recording, Runtime, TopologyError, VirtualClock, replay
from scheduler.reactor.recording import Full, line
from tests.unit.scheduler.reactor.toys import Random, build

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy."""
SOME = st.sets(st.integers(0, 4), max_size=3).map(sorted)
REACTORS = st.lists(
    st.fixed_dictionaries(
        {
            "inputs": st.integers(0, 3),
            "outputs": st.integers(0, 3),
            "reactions": st.lists(
                st.fixed_dictionaries({"on": SOME, "writes": SOME}), min_size=1, max_size=3
            ),
        }
    ),
    min_size=1,
    max_size=4,
)
LINKS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 11), st.sampled_from([None, None, 0, 1, 5])).map(list),
    max_size=8,
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.integers(0, 6)),
        st.tuples(st.just("inject"), st.integers(0, 50)),
        st.tuples(st.just("advance"), st.just(0)),
    ),
    max_size=20,
)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """A description that builds: cycles get delays."""
    spec: dict[str, Any] = {"reactors": draw(REACTORS), "links": draw(LINKS)}
    try:
        build(spec)
    except TopologyError:
        spec["links"] = [[source, target, after or 0] for source, target, after in spec["links"]]
    return spec


def perform(
    spec: dict[str, Any],
    operations: list[tuple[str, int]],
    folder: str,
    close: bool = True,
    size: int = 10**9,
) -> list[str]:
    """Runs a program through the operations; returns the lines of its recording, whose files are full at a size."""
    path = Path(folder) / "run.jsonl"
    path.unlink(missing_ok=True)
    program, clock, recording = build(spec), VirtualClock(7), Recording.open(path, spec, Limit(size))
    runtime = Runtime(program, clock, recording)
    runtime.start()
    for kind, number in operations:
        reactor = program.reactors[number % len(program.reactors)]
        assert isinstance(reactor, Random)
        if kind == "move":
            clock.advance_to(clock.now() + number)
        elif kind == "inject":
            runtime.inject(reactor.event, number)
        else:
            runtime.advance()
    runtime.run_until(clock.now() + 30)
    if close:
        recording.close()
    return path.read_text().splitlines()


@UNHURRIED
@given(programs())
def test_nothing_is_read_before_it_is_written(spec: dict[str, Any]) -> None:
    program: Program = build(spec)
    for reactor in program.reactors:
        levels = [reaction.level for reaction in reactor.reactions]
        assert levels == sorted(set(levels))
    for link in program.connections:
        for writer in program.reactions:
            for reader in program.reactions:
                if link.after is None and link.source in writer.writes and link.target in reader.on:
                    assert writer.level < reader.level
    tops = {reaction.level for reaction in program.reactions}
    assert tops == set(range(len(tops)))


@UNHURRIED
@given(programs(), OPERATIONS)
def test_the_same_events_give_the_same_record_and_it_replays(
    spec: dict[str, Any], operations: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = perform(spec, operations, folder)
        assert perform(spec, operations, folder) == lines
    tags = [tuple(json.loads(line)["tag"]) for line in lines[1:] if "action" in json.loads(line)]
    assert all(before < after for before, after in itertools.pairwise(tags))
    assert len(tags) == sum(kind == "inject" for kind, _ in operations)
    report = replay(lines, build)
    assert report.difference is None
    assert not report.graph_changed


@UNHURRIED
@given(programs(), OPERATIONS, st.integers(1, 3000), st.booleans())
def test_a_run_replays_from_any_file_on(
    spec: dict[str, Any], operations: list[tuple[str, int]], size: int, close: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = perform(spec, operations, folder, close)[1:]
        perform(spec, operations, folder, close, size)
        report = replay(Path(folder) / "run.jsonl", build)
    assert report.difference is None
    entries = [line(entry) for run in report.runs for entry in run.run.entries if not isinstance(entry, Full)]
    assert entries == whole[len(whole) - len(entries) :]
    assert report.runs[0].run.header.state is not None or len(entries) == len(whole)


@UNHURRIED
@given(programs(), OPERATIONS, st.data())
def test_a_changed_decision_is_found_and_a_cut_recording_replays(
    spec: dict[str, Any], operations: list[tuple[str, int]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = perform(spec, operations, folder, close=False)
    text = "\n".join(lines) + "\n"
    cut = data.draw(st.integers(len(lines[0]), len(text)), label="cut")
    assert replay(text[:cut].splitlines(), build).equal
    decisions = [index for index, line in enumerate(lines) if '"port"' in line]
    assume(decisions)
    index = data.draw(st.sampled_from(decisions), label="changed")
    changed = json.loads(lines[index])
    changed["value"] += 1
    difference = replay([*lines[:index], json.dumps(changed), *lines[index + 1 :]], build).difference
    assert difference is not None
    assert difference.recorded == changed
    assert difference.replayed == json.loads(lines[index])
