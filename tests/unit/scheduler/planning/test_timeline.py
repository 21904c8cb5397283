"""Intervals partition a run, whatever happened; seconds are sums over them."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.planning.timeline import Kind, Step, Timeline, intervals_of
from tests.unit.scheduler.planning.partition import assert_partition

moments = st.floats(-5, 105, allow_nan=False) | st.sampled_from([0.0, 10.0, 50.0, 100.0])
changes = st.lists(st.tuples(moments, st.sampled_from(get_args(Kind))), max_size=30).map(
    lambda found: sorted(found, key=lambda change: change[0])
)


def kind_at(changes: list[tuple[float, Kind]], at: float) -> Kind:
    """Reference implementation: the kind after the last change at or before `at`."""
    return next((kind for when, kind in reversed(changes) if when <= at), "idle")


@given(st.lists(changes, min_size=1, max_size=3), st.floats(0, 99), st.floats(0.5, 100))
def test_a_nodes_intervals_partition_the_runs_time(
    nodes: list[list[tuple[float, Kind]]], start: float, length: float
) -> None:
    found = [i for n, changed in enumerate(nodes) for i in intervals_of(f"n{n}", changed, 0.0, 100.0)]
    timeline = Timeline(0.0, 100.0, tuple(found))
    for one in (timeline, timeline.within(start, start + length)):
        assert_partition(one)
        for seconds in one.by_kind().values():
            assert math.isclose(sum(seconds.values()), one.seconds, abs_tol=1e-9)
    for interval in found:
        middle = (interval.start_s + interval.end_s) / 2
        if interval.start_s < middle < interval.end_s:
            assert interval.kind == kind_at(nodes[int(interval.node[1:])], middle)


def test_neighbors_differ_and_a_part_knows_when_the_run_began() -> None:
    found = tuple(intervals_of("a", [(1.0, "idle"), (2.0, "train"), (3.0, "train")], 0.0, 5.0))
    assert [(i.kind, i.start_s, i.end_s) for i in found] == [("idle", 0.0, 2.0), ("train", 2.0, 5.0)]
    timeline = Timeline(0.0, 5.0, found, began=1000.0)
    assert timeline.within(1.0, 4.0).began == 1000.0
    with pytest.raises(ValueError, match="nothing between"):
        timeline.within(5.0, 9.0)


def test_the_steps_begin_with_the_first_work_of_a_node() -> None:
    changed: dict[str, list[tuple[float, Kind]]] = {
        "r": [(4.0, "rollout")],
        "t": [(2.0, "train"), (3.0, "idle")],
    }
    intervals = tuple(i for node, at in changed.items() for i in intervals_of(node, at, 0.0, 10.0))
    part = Timeline(0.0, 10.0, intervals, (Step(0, 8.0),)).in_steps()
    assert (part.start_s, part.end_s) == (2.0, 8.0)
    with pytest.raises(ValueError, match="no step has ended"):
        Timeline(0.0, 10.0, intervals).in_steps()
