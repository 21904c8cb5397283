"""The rules that several tables of the configuration obey together. Each raises ValueError, which names the tables and keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

from pydantic import SecretStr

from gateway.sections.access import AdminSettings, AgentSettings, ProjectSettings
from gateway.sections.engines import EngineSettings, is_public, public_engine
from gateway.sections.environment import key_variable
from gateway.sections.episodes import GraderSettings
from gateway.sections.models import ModelSettings
from gateway.sections.scheduling import LengthSettings, NodeSettings, RoutingSettings
from gateway.sections.server import ClusterSettings, ServerSettings, StoreSettings

Models = Mapping[str, ModelSettings]


def check_ports(server: ServerSettings, admin: AdminSettings, projects: Collection[str]) -> None:
    """The admin API needs a key outside of loopback addresses, and a port that is not the server's."""
    if admin.key is None:
        if not is_loopback(server.host):
            raise ValueError("[admin] key is needed when [server] host is not a loopback address")
        if not is_loopback(admin.host or server.host):
            raise ValueError("[admin] key is needed when [admin] host is not a loopback address")
        if projects:
            raise ValueError(
                "[admin] key is needed with [projects]: without one, everybody reaches everything"
            )
    if admin.port is not None and admin.port == server.port:
        raise ValueError("[admin] port is [server] port: name another, or none")


def check_projects(projects: Mapping[str, ProjectSettings], models: Models) -> None:
    """A project has models that there are, and a trained model one project."""
    owners: dict[str, list[str]] = {}
    for name, project in projects.items():
        for model in project.models:
            if model not in models:
                raise ValueError(f"[projects.{name}] models: {model!r} is no model")
            owners.setdefault(model, []).append(name)
    for model, names in owners.items():
        if models[model].train and len(names) > 1:
            raise ValueError(
                f"[projects]: the trained model {model!r} is in {', '.join(names)}; one may have it"
            )
    if not _variables_differ(projects):
        raise ValueError("[projects]: two names differ in nothing but capitals, `-` and `_`")


def check_cluster(cluster: ClusterSettings, store: StoreSettings) -> None:
    """Several processes need a key, and a store that they share."""
    if cluster.url is None:
        return
    if cluster.key is None:
        raise ValueError("[cluster] key is needed with [cluster] url; or HEADGATE_CLUSTER_KEY")
    if not store.url.startswith("postgres"):
        raise ValueError("several gateway processes need PostgreSQL: [store] url = 'postgresql://...'")


def check_models(models: Models) -> None:
    """One model at least is trained, and a name means one model."""
    if not any(model.train for model in models.values()):
        raise ValueError("[models] needs one that is trained")
    names = [name for key, model in models.items() for name in (key, *(model.aliases or ()))]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"[models]: {', '.join(twice)} would mean two models")


def check_graders(graders: Mapping[str, GraderSettings], models: Models) -> None:
    """A grader grades trained models."""
    if "calls" in graders:
        raise ValueError(
            "[graders]: `calls` is the name of what is posted on calls; call the grader something else"
        )
    for name, grader in graders.items():
        for model in grader.models or ():
            if not _trained(models, model):
                raise ValueError(f"[graders.{name}] models: {model!r} is no trained model")


def check_agents(
    agents: Mapping[str, AgentSettings], models: Models, keys: Iterable[SecretStr | None]
) -> None:
    """No two keys are the same, and an agent's episodes are about a trained model. `keys`: those of others than agents."""
    given = [*(agent.key for agent in agents.values()), *keys]
    secrets = [key.get_secret_value() for key in given if key is not None]
    if len(set(secrets)) < len(secrets):
        raise ValueError(
            "[agents]: each needs a key of its own, and none may have the admin key; so do [projects] and the cluster"
        )
    if not _variables_differ(agents):
        raise ValueError("[agents]: two names differ in nothing but capitals, `-` and `_`")
    for name, agent in agents.items():
        if agent.model is not None and not _trained(models, agent.model):
            raise ValueError(f"[agents.{name}] model: {agent.model!r} is no trained model")


def check_engines(engines: Mapping[str, EngineSettings], nodes: Mapping[str, NodeSettings]) -> None:
    """An engine runs one model, and lives in one place. `engines`: of each model that has some."""
    places = [*(place for engine in engines.values() for place in engine.places)]
    places += [place for node in nodes.values() for place in node.places]
    urls = [url for url in places if url is not None]
    if shared := sorted({url for url in urls if urls.count(url) > 1}):
        raise ValueError(
            f"an engine runs one model: give each of several a [models.NAME.engine] ({shared[0]})"
        )


def check_node(
    name: str, node: NodeSettings, model: str, models: Models, engines: Mapping[str, EngineSettings]
) -> None:
    """A node's engines can be started or reached. `model`: what they run; `engines`: of each model that has some."""
    if model not in engines:
        raise ValueError(f"[nodes.{name}] model: {model!r} is no model on engines")
    if node.engines and engines[model].launch == "external":
        raise ValueError(
            f"[nodes.{name}] engines: the engines of {model!r} are external, so nothing can be started: name their `urls`"
        )
    if name in models and node.places:
        raise ValueError(f"[nodes.{name}]: its engines would be named like those of the model {name!r}")
    for url in node.urls:
        if not engines[model].allow_public and is_public(urlsplit(url).hostname or ""):
            raise ValueError(f"[nodes.{name}] urls: {public_engine(url)}")


def check_tails(routing: RoutingSettings, lengths: LengthSettings) -> None:
    """Engines for long calls need predictions of lengths."""
    if routing.tails and lengths.ranker == "none":
        raise ValueError(
            "[routing] tails: nobody says which calls will be long, for [lengths] ranker is none: choose another"
        )


def _trained(models: Models, name: str) -> bool:
    return name in models and models[name].train


def _variables_differ(names: Collection[str]) -> bool:
    return len({key_variable(name) for name in names}) == len(names)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches what listens at `host`; False for names other than localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
