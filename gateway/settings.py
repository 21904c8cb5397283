"""The gateway's configuration: one TOML file, every key typed and bounded, unknown keys refused.

Relative paths are taken from the folder in which the gateway is started. What differs from process to process, and what no file
should hold, may stand in the environment instead (`ENVIRONMENT`), and `HEADGATE_AGENT_KEY_NAME` for `[agents.NAME] key`
(`HEADGATE_PROJECT_KEY_NAME` for a project's). What the file says goes before it. `HEADGATE_ENGINE_URLS` is the supervisor's
(`gateway/workers.py`): engines that it has started.
"""

from __future__ import annotations

import ipaddress
import json
import os
import tomllib
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from gateway.sections import (
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
    LengthSettings,
    LimitsSettings,
    ModelSettings,
    Name,
    NodeSettings,
    ProjectSettings,
    QueueSettings,
    RenderSettings,
    RequestSettings,
    RetentionSettings,
    RewardSettings,
    RoutingSettings,
    SamplingSettings,
    Section,
    ServerSettings,
    StalenessSettings,
    StoreSettings,
    UpdateSettings,
    is_public,
    public_engine,
)
from scheduler.configuration import complaints

ENVIRONMENT = {
    "HEADGATE_PUBLIC_URL": ("server", "public_url"),
    "HEADGATE_ADMIN_KEY": ("admin", "key"),
    "HEADGATE_STORE_URL": ("store", "url"),
    "HEADGATE_BUS_URL": ("bus", "url"),
    "HEADGATE_CLUSTER_URL": ("cluster", "url"),
    "HEADGATE_CLUSTER_KEY": ("cluster", "key"),
}
"""For each variable: the key that it stands in for."""
SECRETS = (*ENVIRONMENT, "HEADGATE_AGENT_KEY_", "HEADGATE_PROJECT_KEY_")
"""Prefixes of variables that engines must not see."""
ENGINE_URLS = "HEADGATE_ENGINE_URLS"
"""JSON, `{model: [url, ...]}`: these models' engines are running already, whatever `launch` says."""


class ConfigError(Exception):
    """A configuration file that cannot be used; the message names the file and every wrong key."""


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
    requests: RequestSettings = RequestSettings()
    episodes: EpisodeSettings = EpisodeSettings()
    calls: CallSettings = CallSettings()
    store: StoreSettings = StoreSettings()
    retention: RetentionSettings = RetentionSettings()
    bus: BusSettings = BusSettings()
    cluster: ClusterSettings = ClusterSettings()
    update: UpdateSettings = UpdateSettings()
    queue: QueueSettings = QueueSettings()
    routing: RoutingSettings = RoutingSettings()
    lengths: LengthSettings = LengthSettings()
    nodes: dict[Name, NodeSettings] = Field(default_factory=dict)
    lending: LendingSettings = LendingSettings()
    feed: FeedSettings = FeedSettings()
    control: ControlSettings = ControlSettings()

    @model_validator(mode="after")
    def _closed_outside_loopback(self) -> Self:
        if self.admin.key is None:
            if not _is_loopback(self.server.host):
                raise ValueError("[admin] key is needed when [server] host is not a loopback address")
            if not _is_loopback(self.admin.host or self.server.host):
                raise ValueError("[admin] key is needed when [admin] host is not a loopback address")
            if self.projects:
                raise ValueError(
                    "[admin] key is needed with [projects]: without one, everybody reaches everything"
                )
        return self

    @model_validator(mode="after")
    def _admin_port_is_its_own(self) -> Self:
        if self.admin.port is not None and self.admin.port == self.server.port:
            raise ValueError("[admin] port is [server] port: name another, or none")
        return self

    @model_validator(mode="after")
    def _projects_are_apart(self) -> Self:
        owners: dict[str, list[str]] = {}
        for name, project in self.projects.items():
            for model in project.models:
                if model not in self.models:
                    raise ValueError(f"[projects.{name}] models: {model!r} is no model")
                owners.setdefault(model, []).append(name)
        for model, names in owners.items():
            if self.models[model].train and len(names) > 1:
                raise ValueError(
                    f"[projects]: the trained model {model!r} is in {', '.join(names)}; one may have it"
                )
        if len({_variable(name) for name in self.projects}) < len(self.projects):
            raise ValueError("[projects]: two names differ in nothing but capitals, `-` and `_`")
        return self

    @model_validator(mode="after")
    def _cluster_can_be_one(self) -> Self:
        if self.cluster.url is not None:
            if self.cluster.key is None:
                raise ValueError("[cluster] key is needed with [cluster] url; or HEADGATE_CLUSTER_KEY")
            if not self.store.url.startswith("postgres"):
                raise ValueError(
                    "several gateway processes need PostgreSQL: [store] url = 'postgresql://...'"
                )
        return self

    @model_validator(mode="after")
    def _names_are_clear(self) -> Self:
        if not any(model.train for model in self.models.values()):
            raise ValueError("[models] needs one that is trained")
        names = [name for key, model in self.models.items() for name in (key, *(model.aliases or ()))]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"[models]: {', '.join(twice)} would mean two models")
        return self

    @model_validator(mode="after")
    def _graders_have_models(self) -> Self:
        if "calls" in self.graders:
            raise ValueError(
                "[graders]: `calls` is the name of what is posted on calls; call the grader something else"
            )
        for name, grader in self.graders.items():
            for model in grader.models or ():
                if model not in self.models or not self.models[model].train:
                    raise ValueError(f"[graders.{name}] models: {model!r} is no trained model")
        return self

    @model_validator(mode="after")
    def _agents_are_told_apart(self) -> Self:
        agents = [agent.key for agent in self.agents.values()]
        given = [
            *agents,
            *(project.key for project in self.projects.values()),
            self.admin.key,
            self.cluster.key,
        ]
        keys = [key.get_secret_value() for key in given if key is not None]
        if len(set(keys)) < len(keys):
            raise ValueError(
                "[agents]: each needs a key of its own, and none may have the admin key; so do [projects] and the cluster"
            )
        if len({_variable(name) for name in self.agents}) < len(self.agents):
            raise ValueError("[agents]: two names differ in nothing but capitals, `-` and `_`")
        for name, agent in self.agents.items():
            if agent.model is not None and (
                agent.model not in self.models or not self.models[agent.model].train
            ):
                raise ValueError(f"[agents.{name}] model: {agent.model!r} is no trained model")
        return self

    @model_validator(mode="after")
    def _engines_are_not_shared(self) -> Self:
        engines = [self.engine_of(name) for name, model in self.models.items() if model.upstream is None]
        places = [*(place for engine in engines for place in engine.places)]
        places += [place for node in self.nodes.values() for place in node.places]
        urls = [url for url in places if url is not None]
        if shared := sorted({url for url in urls if urls.count(url) > 1}):
            raise ValueError(
                f"an engine runs one model: give each of several a [models.NAME.engine] ({shared[0]})"
            )
        return self

    @model_validator(mode="after")
    def _nodes_have_engines_that_can_be(self) -> Self:
        for name, node in self.nodes.items():
            model = self.model_on(name)
            if model not in self.models or self.models[model].upstream is not None:
                raise ValueError(f"[nodes.{name}] model: {model!r} is no model on engines")
            engine = self.engine_of(model)
            if node.engines and engine.launch == "external":
                raise ValueError(
                    f"[nodes.{name}] engines: the engines of {model!r} are external, so nothing can be started: name their `urls`"
                )
            if name in self.models and node.places:
                raise ValueError(
                    f"[nodes.{name}]: its engines would be named like those of the model {name!r}"
                )
            for url in node.urls:
                if not engine.allow_public and is_public(urlsplit(url).hostname or ""):
                    raise ValueError(f"[nodes.{name}] urls: {public_engine(url)}")
        return self

    @model_validator(mode="after")
    def _tails_are_predicted(self) -> Self:
        if self.routing.tails and self.lengths.ranker == "none":
            raise ValueError(
                "[routing] tails: nobody says which calls will be long, for [lengths] ranker is none: choose another"
            )
        return self

    def model_on(self, node: str) -> str:
        """The model that the engines of a node run."""
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
        """The other names of a model."""
        given = self.models[name].aliases
        return given if given is not None else ("*",) if self.models[name].train else ()

    def engine_of(self, name: str) -> EngineSettings:
        """How a model's engines are started."""
        return self.models[name].engine or self.engine

    def staleness_of(self, name: str) -> StalenessSettings:
        """The bound on a model's samples."""
        return self.models[name].staleness or self.staleness

    def model_of(self, agent: str) -> str:
        """The trained model that an agent's episodes are about."""
        return self.agents[agent].model or self.model_name

    @classmethod
    def load(cls, path: Path, only: tuple[str, ...] = ()) -> Settings:
        """Reads a TOML file, or only some of its sections. Raises ConfigError."""
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: {error}") from error
        if only:
            values = {section: given for section, given in values.items() if section in only}
        return cls.parse(values, str(path), environment=not only)

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "settings", environment: bool = True) -> Settings:
        """Checks values as they come from TOML; the environment fills in what they lack, if it is asked. Raises ConfigError."""
        if environment:
            values = _filled(values)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n  ".join([f"{source}:", *complaints(error, cls)])) from error


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """With what the environment has (`ENVIRONMENT`)."""
    for variable, (section, key) in ENVIRONMENT.items():
        if (given := os.environ.get(variable)) and isinstance(table := values.get(section, {}), dict):
            values = {**values, section: {key: given, **table}}
    if urls := os.environ.get(ENGINE_URLS):
        values = _with_engines(values, json.loads(urls))
    for section, kind in (("agents", "AGENT"), ("projects", "PROJECT")):
        if isinstance(holders := values.get(section), dict):
            values = {
                **values,
                section: {name: _with_key(name, given, kind) for name, given in holders.items()},
            }
    return values


def _variable(name: str, kind: str = "AGENT") -> str:
    return f"HEADGATE_{kind}_KEY_{name.upper().replace('-', '_')}"


def _with_key(name: str, values: Any, kind: str) -> Any:
    key = os.environ.get(_variable(str(name), kind))
    return {"key": key, **values} if key and isinstance(values, dict) else values


def _with_engines(values: dict[str, Any], urls: dict[str, list[str]]) -> dict[str, Any]:
    models = dict(values["models"])
    for name, places in urls.items():
        engine = dict(models[name].get("engine", values.get("engine", {})))
        engine.pop("count", None)
        if engine.get("launch", "vllm") == "vllm":
            engine["api"] = "vllm"
        models[name] = {**models[name], "engine": {**engine, "launch": "external", "urls": places}}
    return {**values, "models": models}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
