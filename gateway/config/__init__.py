"""The tables of the gateway's configuration file, one module for each concern (`settings.py` has the whole file)."""

from gateway.config.access import (
    AdminSettings,
    AgentSettings,
    LimitSettings,
    LimitsSettings,
    ProjectLimitSettings,
    ProjectSettings,
    QueueSettings,
)
from gateway.config.base import Days, Name
from gateway.config.engines import (
    EngineSettings,
    UpdateSettings,
    UpstreamSettings,
    is_public,
    public_engine,
    refused_place,
)
from gateway.config.episodes import (
    CallSettings,
    EpisodeSettings,
    FeedSettings,
    GraderSettings,
    RewardSettings,
    StalenessSettings,
)
from gateway.config.models import Bounds, ModelSettings, RenderSettings, SamplingSettings, TokenBounds
from gateway.config.redaction import RedactionSettings
from gateway.config.scheduling import (
    ControlSettings,
    LendingSettings,
    NodeSettings,
    RoutingSettings,
)
from gateway.config.server import (
    BusSettings,
    ClusterMember,
    ClusterSettings,
    RetentionSettings,
    ServerSettings,
    StoreSettings,
    TelemetrySettings,
)
from gateway.config.weights import WeightsSettings
from headgate.configuration import Seconds, Section

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
    "LimitSettings",
    "LimitsSettings",
    "ModelSettings",
    "Name",
    "NodeSettings",
    "ProjectLimitSettings",
    "ProjectSettings",
    "QueueSettings",
    "RedactionSettings",
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
