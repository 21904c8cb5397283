"""A run as intervals: what each node did, from when, until when, and in which step.

Pure. Invariant: a node's intervals partition the run's time. They are in order, the first begins where the run begins, each
begins where the one before ends, the last ends where the run ends, and none crosses the end of a step. So the seconds of a node
add up to the run's, and those of a step to the step's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
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
    step: int
    """The batch that was trained, or waited for, meanwhile."""

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Step:
    """A batch was trained, and its weights handed over, at `end_s`; it began where the one before ended."""

    number: int
    end_s: float


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle seconds in one step, summed over the nodes on which a trainer works, and over the others."""

    step: int
    seconds: float
    """The step's own length."""
    train_s: float
    rollout_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run, or a part of one. Make it with `stretches` for each node; `check` says whether the invariant holds."""

    start_s: float
    end_s: float
    intervals: tuple[Interval, ...]
    """Intervals by node in the order in which nodes are shown; within a node by time."""
    steps: tuple[Step, ...] = ()
    train_nodes: frozenset[str] = frozenset()
    """On which a trainer works, always or at times."""
    began: float = 0.0
    """The run's start, in seconds since 1970; 0 in virtual time."""

    @property
    def seconds(self) -> float:
        """The run's length."""
        return self.end_s - self.start_s

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in the order in which they are shown."""
        return tuple(dict.fromkeys(interval.node for interval in self.intervals))

    def check(self) -> None:
        """Raises ValueError, naming the node, unless every node's intervals partition the run's time."""
        ends = [step.end_s for step in self.steps]
        if any(b.end_s <= a.end_s for a, b in pairwise(self.steps)):
            raise ValueError("the steps are not in order")
        seen: set[str] = set()
        for node, found in groupby(self.intervals, key=lambda interval: interval.node):
            run = list(found)
            if node in seen:
                raise ValueError(f"{node}: its intervals are not together")
            seen.add(node)
            if (run[0].start_s, run[-1].end_s) != (self.start_s, self.end_s):
                raise ValueError(f"{node}: its intervals are not as long as the run")
            if any(a.end_s != b.start_s for a, b in pairwise(run)) or any(i.seconds <= 0 for i in run):
                raise ValueError(f"{node}: its intervals overlap, leave a gap, or are empty")
            if any(
                bisect_left(ends, i.end_s) > 0 and ends[bisect_left(ends, i.end_s) - 1] > i.start_s
                for i in run
            ):
                raise ValueError(f"{node}: an interval crosses the end of a step")

    def within(self, start_s: float, end_s: float) -> Timeline:
        """The part of the run between two moments. Raises ValueError if there is none."""
        start, end = max(start_s, self.start_s), min(end_s, self.end_s)
        if end <= start:
            raise ValueError(f"the run has nothing between {start_s:g} and {end_s:g} s")
        cut = tuple(
            Interval(i.node, i.kind, max(i.start_s, start), min(i.end_s, end), i.step)
            for i in self.intervals
            if i.start_s < end and i.end_s > start
        )
        steps = tuple(step for step in self.steps if start < step.end_s <= end)
        return Timeline(start, end, cut, steps, self.train_nodes, self.began)

    def by_kind(self) -> dict[str, dict[Kind, float]]:
        """The seconds of each node by state; they add up to the run's."""
        found: dict[str, dict[Kind, float]] = {node: dict.fromkeys(KINDS, 0.0) for node in self.nodes}
        for interval in self.intervals:
            found[interval.node][interval.kind] += interval.seconds
        return found

    def share(self, kind: Kind, nodes: Iterable[str] | None = None) -> float | None:
        """The part of these nodes' time (all nodes', if none are named) that went to `kind`; None without a node."""
        by_kind = self.by_kind()
        chosen = [by_kind[node] for node in (by_kind if nodes is None else nodes)]
        whole = sum(sum(seconds.values()) for seconds in chosen)
        return sum(seconds[kind] for seconds in chosen) / whole if whole else None

    def bubbles(self) -> list[Bubble]:
        """The bubbles of every step that ended in this part of the run."""
        idle = {step.number: [0.0, 0.0] for step in self.steps}
        for i in self.intervals:
            if i.kind == "idle" and i.step in idle:
                idle[i.step][i.node not in self.train_nodes] += i.seconds
        starts = [self.start_s, *(step.end_s for step in self.steps)]
        return [
            Bubble(step.number, step.end_s - start, *idle[step.number])
            for start, step in zip(starts, self.steps, strict=False)
        ]


def stretches(
    node: str, changes: Sequence[tuple[float, Kind]], start_s: float, end_s: float, steps: Sequence[Step]
) -> Iterator[Interval]:
    """A node's intervals from its changes: at each time (in order) it began to do something; before the first it was idle.

    What began before the run, or after it, is cut; of several changes at one time the last counts.
    """
    ends = [step.end_s for step in steps]
    after = steps[-1].number + 1 if steps else 0
    borders = [end for end in ends if start_s < end < end_s]
    for kind, start, end in _runs(changes, start_s, end_s):
        cuts = [start, *borders[bisect_left(borders, start) : bisect_left(borders, end)], end]
        for left, right in pairwise(cuts):
            if left < right:
                at = bisect_left(ends, right)
                yield Interval(node, kind, left, right, steps[at].number if at < len(steps) else after)


def _runs(
    changes: Sequence[tuple[float, Kind]], start_s: float, end_s: float
) -> Iterator[tuple[Kind, float, float]]:
    """Merges changes into intervals: no two neighbours alike, none empty."""
    moments: dict[float, Kind] = {}
    for at, new in changes:
        moments[min(max(at, start_s), end_s)] = new
    kind: Kind = "idle"
    since = start_s
    for at, new in moments.items():
        if new != kind and at > since:
            yield kind, since, at
            since = at
        kind = new
    if end_s > since:
        yield kind, since, end_s
