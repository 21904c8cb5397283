"""The tables of the gateway's configuration file, one module for each concern (`settings.py` has the whole file)."""

from gateway.sections.access import (
    AdminSettings,
    AgentSettings,
    LimitSettings,
    LimitsSettings,
    ProjectLimitSettings,
    ProjectSettings,
    QueueSettings,
)
from gateway.sections.base import Days, Name
from gateway.sections.engines import (
    EngineSettings,
    UpdateSettings,
    UpstreamSettings,
    is_public,
    public_engine,
    refused_place,
)
from gateway.sections.episodes import (
    CallSettings,
    EpisodeSettings,
    FeedSettings,
    GraderSettings,
    RewardSettings,
    StalenessSettings,
)
from gateway.sections.models import (
    Bounds,
    ModelSettings,
    RenderSettings,
    SamplingSettings,
    TokenBounds,
)
from gateway.sections.scheduling import (
    ControlSettings,
    LendingSettings,
    LengthSettings,
    NodeSettings,
    RoutingSettings,
)
from gateway.sections.server import (
    BusSettings,
    ClusterMember,
    ClusterSettings,
    RetentionSettings,
    ServerSettings,
    StoreSettings,
    TelemetrySettings,
)
from gateway.sections.weights import WeightsSettings
from scheduler.configuration import Seconds, Section

__all__ = [
    "AdminSettings",
    "AgentSettings",
    "Bounds",
    "BusSettings",
    "CallSettings",
    "ClusterMember",
    "ClusterSettings",
    "ControlSettings",
    "Days",
    "EngineSettings",
    "EpisodeSettings",
    "FeedSettings",
    "GraderSettings",
    "LendingSettings",
    "LengthSettings",
    "LimitSettings",
    "LimitsSettings",
    "ModelSettings",
    "Name",
    "NodeSettings",
    "ProjectLimitSettings",
    "ProjectSettings",
    "QueueSettings",
    "RenderSettings",
    "RetentionSettings",
    "RewardSettings",
    "RoutingSettings",
    "SamplingSettings",
    "Seconds",
    "Section",
    "ServerSettings",
    "StalenessSettings",
    "StoreSettings",
    "TelemetrySettings",
    "TokenBounds",
    "UpdateSettings",
    "UpstreamSettings",
    "WeightsSettings",
    "is_public",
    "public_engine",
    "refused_place",
]
