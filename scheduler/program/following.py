"""The program of a follower: the placement of its own calls, by the coordinator's snapshots.

It never makes an engine pull: the coordinator decides that, and reports it with each snapshot.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.program.placement import Placement, PlacementSettings
from scheduler.reactor import Program


class FollowerProgram(Program):
    """The calls of one model in one process."""

    def __init__(self, settings: PlacementSettings) -> None:
        self.placement = Placement("placement", replace(settings, pull=False))
        super().__init__("follower", [self.placement])
        self.seal()
