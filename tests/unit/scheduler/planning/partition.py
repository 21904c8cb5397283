"""The invariant of timelines: the intervals of every node partition the run's time."""

from __future__ import annotations

from itertools import groupby, pairwise

from scheduler.planning.timeline import Timeline


def assert_partition(timeline: Timeline) -> None:
    """Raise AssertionError unless every node's intervals are in order, without gaps, and as long as the run."""
    by_node = [list(found) for _, found in groupby(timeline.intervals, key=lambda interval: interval.node)]
    assert len(by_node) == len(timeline.nodes)
    for run in by_node:
        assert (run[0].start_s, run[-1].end_s) == (timeline.start_s, timeline.end_s)
        assert all(i.end_s > i.start_s for i in run)
        assert all(a.end_s == b.start_s for a, b in pairwise(run))
