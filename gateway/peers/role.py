"""The role of a gateway process: leader (it is the coordinator) or follower. One value, replaced whole when the role changes.

`gateway.api.context.DataPlane` has what every process has, whatever its role.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.control.host import ControlHost
from gateway.control.models import LeaderModels
from gateway.control.nodes import Nodes
from gateway.control.placement import ControlPlacement
from gateway.episodes.callers import Callers
from gateway.episodes.episodes import Episodes
from gateway.peers.follower import Follower


@dataclass(frozen=True, slots=True)
class Leader:
    """The parts that only the coordinator has."""

    fence: int
    host: ControlHost
    models: LeaderModels
    episodes: Episodes
    callers: Callers
    nodes: Nodes
    placements: dict[str, ControlPlacement]
    """The placement of each model's calls."""


Role = Leader | Follower
