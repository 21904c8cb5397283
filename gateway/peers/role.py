"""The role of a gateway process: coordinator or follower. One value, replaced whole when the role changes.

`gateway.api.context.DataPlane` has what every process has, whatever its role.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.control.host import ControlHost
from gateway.control.models import CoordinatorModels
from gateway.control.nodes import Nodes
from gateway.control.placement import ControlPlacement
from gateway.episodes.callers import Callers
from gateway.episodes.episodes import Episodes
from gateway.errors import Unavailable
from gateway.peers.follower import Follower
from gateway.peers.hub import Hub


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The parts that only the coordinator has."""

    fence: int
    host: ControlHost
    models: CoordinatorModels
    episodes: Episodes
    callers: Callers
    nodes: Nodes
    placements: dict[str, ControlPlacement]
    """The placement of each model's calls."""

    peers: Hub

    async def serves_exclusively(self, episode_id: str) -> bool:
        """True if no follower serves an episode that this process serves."""
        return await self.peers.serves_exclusively(episode_id)


Role = Coordinator | Follower


class CurrentRole:
    """The role that this process has now; none until it knows its place in the cluster."""

    def __init__(self) -> None:
        self._role: Role | None = None

    def enter(self, role: Role) -> None:
        """Begin a role, which ends the one before."""
        self._role = role

    def get(self) -> Role:
        """Return the role. Raise Unavailable before there is one."""
        if self._role is None:
            message = "this gateway process is being started"
            raise Unavailable(message, retry_after=1.0, code="no_coordinator")
        return self._role

    async def serves_exclusively(self, episode_id: str) -> bool:
        """True if no other process serves an episode that this one serves. False if that is not known."""
        return self._role is not None and await self._role.serves_exclusively(episode_id)
