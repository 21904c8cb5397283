"""The state of every node over a run, as intervals.

Pure. Invariant: a node's intervals partition the run's time, so a node's seconds add up to the run's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["rollout", "train", "switching", "idle"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Interval:
    """One state of a node. Seconds are since the run's start."""

    node: str
    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """A batch was trained and its version published at `end_s`; the step began where the previous one ended."""

    number: int
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run, or a part of one. `intervals_of` makes the intervals of each node."""

    start_s: float
    end_s: float
    intervals: tuple[Interval, ...]
    """By node, within a node by time."""
    steps: tuple[Step, ...] = ()
    began: float = 0.0
    """The run's start, in seconds since 1970; 0 in virtual time."""

    @property
    def seconds(self) -> float:
        """The run's length."""
        return self.end_s - self.start_s

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in order."""
        return tuple(dict.fromkeys(interval.node for interval in self.intervals))

    def within(self, start_s: float, end_s: float) -> Timeline:
        """Return the part of the run between two moments. Raise ValueError if it is empty."""
        start, end = max(start_s, self.start_s), min(end_s, self.end_s)
        if end <= start:
            raise ValueError(f"the run has nothing between {start_s:g} and {end_s:g} s")
        cut = tuple(
            Interval(i.node, i.kind, max(i.start_s, start), min(i.end_s, end))
            for i in self.intervals
            if i.start_s < end and i.end_s > start
        )
        steps = tuple(step for step in self.steps if start < step.end_s <= end)
        return Timeline(start, end, cut, steps, self.began)

    def in_steps(self) -> Timeline:
        """Return the part from the first work of a node to the end of the last step. Raise ValueError if no step ended."""
        if not self.steps:
            raise ValueError("no step has ended in it")
        awake = (i.start_s for i in self.intervals if i.kind in ("rollout", "train"))
        return self.within(min(awake, default=self.start_s), self.steps[-1].end_s)

    def by_kind(self) -> dict[str, dict[Kind, float]]:
        """Return the seconds of each node by state."""
        seconds: dict[str, dict[Kind, float]] = {node: dict.fromkeys(KINDS, 0.0) for node in self.nodes}
        for interval in self.intervals:
            seconds[interval.node][interval.kind] += interval.end_s - interval.start_s
        return seconds


def intervals_of(
    node: str, changes: Sequence[tuple[float, Kind]], start_s: float, end_s: float
) -> Iterator[Interval]:
    """Merge a node's changes of state into intervals of which no two neighbors are alike and none is empty.

    A change is a time and the state from then on, in order; before the first the node is idle. Times outside the run are cut.
    Of several changes at one time the last counts.
    """
    moments: dict[float, Kind] = {}
    for at, new in changes:
        moments[min(max(at, start_s), end_s)] = new
    kind: Kind = "idle"
    since = start_s
    for at, new in moments.items():
        if new != kind and at > since:
            yield Interval(node, kind, since, at)
            since = at
        kind = new
    if end_s > since:
        yield Interval(node, kind, since, end_s)
