"""The role of a gateway process: coordinator or follower. One value, replaced whole when the role changes.

`gateway.api.context.DataPlane` has what every process has, whatever its role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.cluster.follower import Follower
from gateway.cluster.hub import Hub
from gateway.cluster.rollout_watch import RolloutWatch
from gateway.control.coordinator_placement import ControlPlacement
from gateway.control.host import ControlHost
from gateway.control.models import CoordinatorModels, ServedModel, TrainedModel
from gateway.control.nodes import NodeDescription, Nodes, TrainedBatch
from gateway.control.version_records import VersionRecords
from gateway.episodes.callers import Callers
from gateway.episodes.episodes import Episodes
from gateway.episodes.erasure import Erasure
from gateway.episodes.late_feedback import LateFeedback
from gateway.tenancy.projects import Reach
from headgate.errors import Unavailable
from scheduler.policies.overdue import SlowEpisode


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

    rollout: RolloutWatch
    peers: Hub
    erasure: Erasure
    late_feedback: LateFeedback

    # See `gateway.control.read_model.ConsoleView`

    def served_models(self) -> Sequence[ServedModel]:
        return list(self.models)

    def trained_model(self, name: str | None, reach: Reach) -> TrainedModel:
        return self.models.get_trained(name, reach)

    def versions(self, name: str | None, reach: Reach) -> VersionRecords:
        return self.models.get(name, reach).versions

    def open_models(self) -> Sequence[str]:
        return [live.model for live in self.episodes.live()]

    def slow_episodes(self, model: str) -> Sequence[SlowEpisode]:
        return self.episodes.slow(model)

    def rollout_seconds(self, model: str) -> Mapping[str, float]:
        return self.rollout.seconds(model)

    def waiting(self, model: str) -> Mapping[str, int]:
        return self.episodes.waiting(model)

    def trained_batch(self, model: str) -> TrainedBatch | None:
        return self.nodes.batches.get(model)

    def speeds(self, model: str) -> Mapping[str, Any]:
        return self.placements[model].describe()

    def described_nodes(self) -> Sequence[NodeDescription]:
        return [self.nodes.describe(node) for node in self.nodes.nodes.values()]

    async def serves_exclusively(self, episode_id: str) -> bool:
        """Return true if no follower serves an episode that this process serves."""
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
        """Return true if no other process serves an episode that this one serves. False if that is not known."""
        return self._role is not None and await self._role.serves_exclusively(episode_id)
