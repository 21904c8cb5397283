"""What every node did in a run, second by second: from a recording, or from the simulator; its figures, page and picture."""

from scheduler.timeline.intervals import KINDS, Interval, Kind, Step, Timeline, stretches

__all__ = ["KINDS", "Interval", "Kind", "Step", "Timeline", "stretches"]
