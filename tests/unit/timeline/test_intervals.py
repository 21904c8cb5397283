"""Intervals partition a run, whatever happened; figures are sums over them."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.timeline import Interval, Kind, Step, Timeline, stretches

moments = st.floats(-5, 105, allow_nan=False) | st.sampled_from([0.0, 10.0, 50.0, 100.0])
changes = st.lists(st.tuples(moments, st.sampled_from(get_args(Kind))), max_size=30).map(
    lambda found: sorted(found, key=lambda change: change[0])
)
borders = st.lists(moments.filter(lambda at: 0 < at <= 100), unique=True, max_size=8).map(
    lambda ends: tuple(Step(number, end) for number, end in enumerate(sorted(ends)))
)


def kind_at(changes: list[tuple[float, Kind]], at: float) -> Kind:
    """Reference implementation: the kind after the last change at or before `at`."""
    return next((kind for when, kind in reversed(changes) if when <= at), "idle")


@given(st.lists(changes, min_size=1, max_size=3), borders, st.floats(0, 99), st.floats(0.5, 100))
def test_a_nodes_intervals_partition_the_runs_time(
    nodes: list[list[tuple[float, Kind]]], steps: tuple[Step, ...], start: float, length: float
) -> None:
    found = [i for n, told in enumerate(nodes) for i in stretches(f"n{n}", told, 0.0, 100.0, steps)]
    timeline = Timeline(0.0, 100.0, tuple(found), steps)
    timeline.check()
    part = timeline.within(start, start + length)
    part.check()
    for one in (timeline, part):
        for seconds in one.by_kind().values():
            assert math.isclose(sum(seconds.values()), one.seconds, abs_tol=1e-9)
    for interval in found:
        middle = (interval.start_s + interval.end_s) / 2
        if interval.start_s < middle < interval.end_s:
            assert interval.kind == kind_at(nodes[int(interval.node[1:])], middle)
            later = [step.number for step in steps if step.end_s >= interval.end_s]
            assert interval.step == (later[0] if later else len(steps))


def test_what_is_no_partition_is_refused() -> None:
    def interval(start: float, end: float, node: str = "a") -> Interval:
        return Interval(node, "idle", start, end, 0)

    wrong = {
        "as long": (interval(0, 9),),
        "overlap": (interval(0, 6), interval(5, 10)),
        "gap": (interval(0, 4), interval(5, 10)),
        "together": (interval(0, 10), interval(0, 10, "b"), interval(0, 10)),
        "step": (interval(0, 10),),
    }
    for said, intervals in wrong.items():
        steps = (Step(0, 5.0),) if said == "step" else ()
        with pytest.raises(ValueError, match=said):
            Timeline(0, 10, intervals, steps).check()
    with pytest.raises(ValueError, match="order"):
        Timeline(0, 10, (), (Step(0, 5.0), Step(1, 4.0))).check()


def test_shares_and_bubbles_by_hand() -> None:
    steps = (Step(4, 10.0), Step(5, 18.0))
    told = {
        "r": [(0.0, "rollout"), (9.0, "idle"), (11.0, "rollout")],
        "t": [(2.0, "train"), (6.0, "idle"), (12.0, "switching"), (13.0, "train")],
    }
    intervals = tuple(i for node, at in told.items() for i in stretches(node, at, 0.0, 20.0, steps))
    timeline = Timeline(0.0, 20.0, intervals, steps, frozenset("t"))
    assert timeline.by_kind() == {
        "r": {"rollout": 18.0, "train": 0.0, "switching": 0.0, "idle": 2.0},
        "t": {"rollout": 0.0, "train": 11.0, "switching": 1.0, "idle": 8.0},
    }
    assert (timeline.share("idle"), timeline.share("idle", ["t"]), timeline.share("idle", [])) == (
        0.25,
        0.4,
        None,
    )
    assert [(b.step, b.seconds, b.train_s, b.rollout_s) for b in timeline.bubbles()] == [
        (4, 10.0, 6.0, 1.0),
        (5, 8.0, 2.0, 1.0),
    ]
    assert {i.step for i in intervals if i.start_s >= 18} == {6}
    with pytest.raises(ValueError, match="nothing between"):
        timeline.within(20.0, 30.0)


def test_neighbours_differ_and_a_part_knows_when_the_run_began() -> None:
    found = tuple(stretches("a", [(1.0, "idle"), (2.0, "train"), (3.0, "train")], 0.0, 5.0, ()))
    assert [(i.kind, i.start_s, i.end_s) for i in found] == [("idle", 0.0, 2.0), ("train", 2.0, 5.0)]
    assert Timeline(0.0, 5.0, found, began=1000.0).within(1.0, 4.0).began == 1000.0
