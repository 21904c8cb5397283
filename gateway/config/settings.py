"""The gateway's configuration: one TOML file, every key typed and bounded, unknown keys refused.

The file may hold the trainer's tables too (`headgate/configuration.py`). Each table of the gateway is in `gateway/config`, in the
module of its concern; rules over several tables are in `cross_checks.py`.
Relative paths are taken from the folder in which the gateway is started. What differs from process to process, and what no file
should hold, may stand in the environment instead (`environment.py`), and `HEADGATE_AGENT_KEY_NAME` for `[agents.NAME]
key` (`HEADGATE_PROJECT_KEY_NAME` for a project's). The file takes precedence. `HEADGATE_ENGINE_URLS` names engines
that run already: those of a supervisor (`gateway/workers.py`), or of compose.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, model_validator

from gateway.config import (
    AdminSettings,
    AgentSettings,
    BusSettings,
    CallSettings,
    ClusterSettings,
    ControlSettings,
    EngineSettings,
    EpisodeSettings,
    FeedSettings,
    GraderSettings,
    LendingSettings,
    LimitsSettings,
    ModelSettings,
    Name,
    NodeSettings,
    ProjectSettings,
    QueueSettings,
    RedactionSettings,
    RenderSettings,
    RetentionSettings,
    RewardSettings,
    RoutingSettings,
    SamplingSettings,
    Section,
    ServerSettings,
    StalenessSettings,
    StoreSettings,
    TelemetrySettings,
    UpdateSettings,
    WeightsSettings,
    cross_checks,
)
from gateway.config.environment import filled
from headgate.configuration import Unreadable, complaints, own_tables, read_toml


class ConfigError(Exception):
    """A configuration file that cannot be used; the message names the file and every wrong key."""

    status: ClassVar[int] = 2
    """The exit status of a program that cannot start: with 2, supervisors do not start it again."""


class NotReady(ConfigError):
    """What the configuration names cannot be used now, and may be at the next start."""

    status = 1


class Settings(Section):
    """The whole file."""

    server: ServerSettings = ServerSettings()
    admin: AdminSettings = AdminSettings()
    models: dict[str, ModelSettings] = Field(min_length=1)
    engine: EngineSettings = EngineSettings()
    render: RenderSettings = RenderSettings()
    sampling: SamplingSettings = SamplingSettings()
    staleness: StalenessSettings = StalenessSettings()
    rewards: RewardSettings = RewardSettings()
    graders: dict[str, GraderSettings] = Field(default_factory=dict)
    agents: dict[Name, AgentSettings] = Field(default_factory=dict)
    projects: dict[Name, ProjectSettings] = Field(default_factory=dict)
    limits: LimitsSettings = LimitsSettings()
    episodes: EpisodeSettings = EpisodeSettings()
    calls: CallSettings = CallSettings()
    store: StoreSettings = StoreSettings()
    retention: RetentionSettings = RetentionSettings()
    redaction: RedactionSettings = RedactionSettings()
    bus: BusSettings = BusSettings()
    cluster: ClusterSettings = ClusterSettings()
    update: UpdateSettings = UpdateSettings()
    weights: WeightsSettings = WeightsSettings()
    queue: QueueSettings = QueueSettings()
    routing: RoutingSettings = RoutingSettings()
    nodes: dict[Name, NodeSettings] = Field(default_factory=dict)
    lending: LendingSettings = LendingSettings()
    feed: FeedSettings = FeedSettings()
    control: ControlSettings = ControlSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _tables_agree(self) -> Self:
        cross_checks.check_ports(self.server, self.admin, self.projects)
        cross_checks.check_projects(self.projects, self.models)
        cross_checks.check_cluster(self.cluster, self.store)
        cross_checks.check_redaction(self.redaction, self.bus, self.cluster)
        cross_checks.check_models(self.models)
        cross_checks.check_graders(self.graders, self.models)
        keys = (*(project.key for project in self.projects.values()), self.admin.key, self.cluster.key)
        cross_checks.check_agents(self.agents, self.models, keys)
        engines = {
            name: self.engine_of(name) for name, model in self.models.items() if model.upstream is None
        }
        cross_checks.check_engines(engines, self.nodes)
        cross_checks.check_vllm(self.models, engines)
        cross_checks.check_transports(engines, self.weights, self.cluster)
        cross_checks.check_canary(
            self.update, self.agents, self._live_models(), self._engine_counts(engines), self.cluster
        )
        for name, node in self.nodes.items():
            cross_checks.check_node(name, node, self.model_on(name), self.models, engines)
        return self

    def _live_models(self) -> set[str]:
        return {self.model_of(name) for name, agent in self.agents.items() if agent.live}

    def _engine_counts(self, engines: Mapping[str, EngineSettings]) -> dict[str, int]:
        """Return the number of engines of each model at the start, without those that a trainer borrows."""
        counts = {name: len(engine.places) for name, engine in engines.items()}
        for name, node in self.nodes.items():
            if "train" not in node.tags and self.model_on(name) in counts:
                counts[self.model_on(name)] += len(node.places)
        return counts

    def live_agents_of(self, model: str) -> frozenset[str]:
        """Return the agents in daily use whose conversations are with a model."""
        return frozenset(n for n, agent in self.agents.items() if agent.live and self.model_of(n) == model)

    def model_on(self, node: str) -> str:
        """Return the model that the engines of a node run."""
        return self.nodes[node].model or self.model_name

    @property
    def model_name(self) -> str:
        """The name of the first trained model."""
        return next(name for name, model in self.models.items() if model.train)

    @property
    def model(self) -> ModelSettings:
        """The first trained model."""
        return self.models[self.model_name]

    def aliases_of(self, name: str) -> tuple[str, ...]:
        """Return the other names of a model."""
        given = self.models[name].aliases
        return given if given is not None else ("*",) if self.models[name].train else ()

    def engine_of(self, name: str) -> EngineSettings:
        """Return the settings by which a model's engines are started."""
        return self.models[name].engine or self.engine

    def staleness_of(self, name: str) -> StalenessSettings:
        """Return the bound on a model's samples."""
        return self.models[name].staleness or self.staleness

    def model_of(self, agent: str) -> str:
        """Return the trained model that an agent's episodes are about."""
        return self.agents[agent].model or self.model_name

    @classmethod
    def load(cls, path: Path, only: tuple[str, ...] = ()) -> Settings:
        """Read a TOML file, or only some of its sections. Raise ConfigError."""
        try:
            values = own_tables(read_toml(path), "gateway")
        except Unreadable as error:
            raise ConfigError(str(error)) from error
        if only:
            values = {section: given for section, given in values.items() if section in only}
        return cls.parse(values, str(path), environment=not only)

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "settings", environment: bool = True) -> Settings:
        """Check values as they come from TOML; with `environment`, its variables supply missing keys. Raise ConfigError."""
        try:
            values = filled(values) if environment else values
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n  ".join([f"{source}:", *complaints(error, cls)])) from error
