"""The timeline of a run, from a recording or from the simulator: the state of every node at each second, its figures,
page and picture."""

from scheduler.timeline.intervals import KINDS, Interval, Kind, Step, Timeline, stretches

__all__ = ["KINDS", "Interval", "Kind", "Step", "Timeline", "stretches"]
