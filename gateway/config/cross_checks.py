"""The rules that several tables of the configuration obey together. Each raises ValueError, which names the tables and keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

from pydantic import SecretStr

from gateway.config.access import AdminSettings, AgentSettings, ProjectSettings
from gateway.config.engines import EngineSettings, UpdateSettings, refused_place
from gateway.config.environment import key_variable
from gateway.config.episodes import GraderSettings
from gateway.config.models import ModelSettings
from gateway.config.redaction import RedactionSettings
from gateway.config.scheduling import NodeSettings
from gateway.config.server import BusSettings, ClusterSettings, ServerSettings, StoreSettings
from gateway.config.weights import WeightsSettings

Models = Mapping[str, ModelSettings]


def check_ports(server: ServerSettings, admin: AdminSettings, projects: Collection[str]) -> None:
    """Check that the admin API has a key outside of loopback addresses, and a port that is not the server's."""
    if admin.key is None:
        if not is_loopback(server.host):
            raise ValueError("[admin] key is needed when [server] host is not a loopback address")
        if not is_loopback(admin.host or server.host):
            raise ValueError("[admin] key is needed when [admin] host is not a loopback address")
        if projects:
            raise ValueError(
                "[admin] key is needed with [projects]: without one, any client reaches everything"
            )
    if admin.port is not None and admin.port == server.port:
        raise ValueError(
            "[admin] port must differ from [server] port: set another port, or leave [admin] port out"
        )


def check_projects(projects: Mapping[str, ProjectSettings], models: Models) -> None:
    """Check that a project's models exist, and that a trained model is in at most one project."""
    owners: dict[str, list[str]] = {}
    for name, project in projects.items():
        for model in project.models:
            if model not in models:
                raise ValueError(f"[projects.{name}] models: there is no model {model!r}")
            owners.setdefault(model, []).append(name)
    for model, names in owners.items():
        if models[model].train and len(names) > 1:
            raise ValueError(
                f"[projects]: the trained model {model!r} is in {', '.join(names)}; it may be in only one"
            )
    if not _variables_differ(projects):
        raise ValueError("[projects]: two names differ only in case, `-` or `_`: rename one")


def check_vllm(models: Models, engines: Mapping[str, EngineSettings]) -> None:
    """Check that only vLLM gets images, and reports experts and truncated distributions."""
    for name, model in models.items():
        for key in ("images", "router_replay"):
            if getattr(model, key) and engines[name].api != "vllm":
                raise ValueError(
                    f"[models.{name}] {key} = true needs an engine with api = 'vllm': leave it out"
                )
        if model.kept_tokens and engines[name].api != "vllm":
            raise ValueError(
                f"[models.{name}] kept_tokens needs an engine with api = 'vllm', whose log-probabilities are those after"
                " truncation: leave it out"
            )


def check_cluster(cluster: ClusterSettings, store: StoreSettings) -> None:
    """Check that several processes have a key and a shared store."""
    if cluster.url is None:
        return
    if cluster.key is None:
        raise ValueError("[cluster] url needs [cluster] key, or the variable HEADGATE_CLUSTER_KEY")
    if not store.url.startswith("postgres"):
        raise ValueError("several gateway processes need PostgreSQL: [store] url = 'postgresql://...'")


def check_redaction(redaction: RedactionSettings, bus: BusSettings, cluster: ClusterSettings) -> None:
    """Check that no other process has to continue calls whose tokens may be stored nowhere."""
    if redaction.active and (cluster.url is not None or not bus.url.startswith("memory://")):
        raise ValueError(
            "[redaction] is for one gateway process so far: leave [bus] and [cluster] out, which share tokens of running calls"
        )


def check_models(models: Models) -> None:
    """Check that at least one model is trained, and that no two models share a name."""
    if not any(model.train for model in models.values()):
        raise ValueError("[models]: at least one model must have train = true")
    names = [name for key, model in models.items() for name in (key, *(model.aliases or ()))]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"[models]: two models have the name or alias {', '.join(twice)}: rename one")


def check_graders(graders: Mapping[str, GraderSettings], models: Models) -> None:
    """Check that a grader grades trained models, and that its judge is frozen: kept judgments must stay valid."""
    if "calls" in graders:
        raise ValueError(
            "[graders.calls]: the name `calls` is reserved for rewards posted on calls: rename the grader"
        )
    for name, grader in graders.items():
        for model in grader.models or ():
            if not _trained(models, model):
                raise ValueError(f"[graders.{name}] models: there is no trained model {model!r}")
        if grader.judge is not None and (grader.judge not in models or models[grader.judge].train):
            raise ValueError(
                f"[graders.{name}] judge: {grader.judge!r} is not a model with train = false; [models.{grader.judge}] adds one"
            )


def check_agents(
    agents: Mapping[str, AgentSettings], models: Models, keys: Iterable[SecretStr | None]
) -> None:
    """Check that no two keys are equal, and that an agent's episodes are of a trained model. `keys`: all keys but the agents'."""
    given = [*(agent.key for agent in agents.values()), *keys]
    secrets = [key.get_secret_value() for key in given if key is not None]
    if len(set(secrets)) < len(secrets):
        raise ValueError(
            "two of the keys in [admin], [agents], [projects] and [cluster] are equal: give each its own"
        )
    if not _variables_differ(agents):
        raise ValueError("[agents]: two names differ only in case, `-` or `_`: rename one")
    for name, agent in agents.items():
        if agent.model is not None and not _trained(models, agent.model):
            raise ValueError(f"[agents.{name}] model: there is no trained model {agent.model!r}")


def check_engines(engines: Mapping[str, EngineSettings], nodes: Mapping[str, NodeSettings]) -> None:
    """Check that an engine runs one model, and that no two engines have the same address. `engines`: by model."""
    places = [*(place for engine in engines.values() for place in engine.places)]
    places += [place for node in nodes.values() for place in node.places]
    urls = [url for url in places if url is not None]
    if shared := sorted({url for url in urls if urls.count(url) > 1}):
        raise ValueError(
            f"two models name the engine at {shared[0]}, and an engine runs one: give each a [models.NAME.engine]"
        )


def check_transports(
    engines: Mapping[str, EngineSettings], weights: WeightsSettings, cluster: ClusterSettings
) -> None:
    """Check that engines which receive versions have a server, and that adapters have one process. `engines`: by model."""
    if not weights.sources and any(engine.transport == "collective" for engine in engines.values()):
        raise ValueError(
            "[engine] transport = 'collective' needs [weights] sources: the server of the trainer, such as 'http://trainer:8100'"
        )
    if cluster.url is not None and any(engine.transport == "lora" for engine in engines.values()):
        raise ValueError(
            "[engine] transport = 'lora' is for one gateway process so far: leave [cluster] out, or use 'files'"
        )


def check_canary(
    update: UpdateSettings,
    agents: Mapping[str, AgentSettings],
    models: Collection[str],
    engines: Mapping[str, int],
    cluster: ClusterSettings,
) -> None:
    """Check that a version can be tried on a share of the conversations. `models`: of the agents; `engines`: how many each model
    has at the start."""
    if not update.canary:
        return
    if not any(agent.live for agent in agents.values()):
        raise ValueError("[update] canary needs an agent with `live = true`, whose conversations are drawn")
    if update.order != "pull":
        raise ValueError("[update] canary needs order = 'pull': engines of both versions serve side by side")
    if cluster.url is not None:
        raise ValueError("[update] canary is for one gateway process so far: leave [cluster] out")
    for model in models:
        if engines.get(model, 0) < 2:
            raise ValueError(
                f"[update] canary needs two engines of {model!r}: one of them keeps the live version ([engine] count = 2)"
            )


def check_node(
    name: str, node: NodeSettings, model: str, models: Models, engines: Mapping[str, EngineSettings]
) -> None:
    """Check that a node's engines can be started or reached. `model`: the model that they run; `engines`: by model."""
    if model not in engines:
        raise ValueError(f"[nodes.{name}] model: no model {model!r} runs on engines")
    if node.engines and engines[model].launch == "external":
        raise ValueError(
            f"[nodes.{name}] engines: [engine] launch of {model!r} is 'external', which starts none: name their `urls`"
        )
    if name in models and node.places:
        raise ValueError(
            f"[nodes.{name}]: a model has the name {name!r}, and their engines' names would collide: rename one"
        )
    for url in node.urls:
        host, allow_public = urlsplit(url).hostname or "", engines[model].allow_public
        if refused := refused_place(url, host, allow_public=allow_public):
            raise ValueError(f"[nodes.{name}] urls: {refused[1]}")


def _trained(models: Models, name: str) -> bool:
    return name in models and models[name].train


def _variables_differ(names: Collection[str]) -> bool:
    return len({key_variable(name) for name in names}) == len(names)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens at `host`; False for names other than localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
