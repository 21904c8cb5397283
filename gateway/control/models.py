"""The models that this gateway serves, and the names by which agents request them.

A trained model has versions and a ledger; a frozen model only has engines; an upstream model is another provider's API. Calls to
a model other than the episode's own are recorded and never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.config import ModelSettings
from gateway.config.settings import Settings
from gateway.control.versions import Versions
from gateway.generation.pool import EnginePool
from gateway.render.renderer import ChatRenderer
from gateway.tenancy.projects import Projects, Reach
from gateway.training_feed.batches import Batches
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import StoredLedger
from gateway.trajectories.recorder import Recorder
from headgate.errors import BadRequest, NotFound
from headgate.routes import RouterShape

if TYPE_CHECKING:
    from gateway.generation.upstream import Upstream


@dataclass(slots=True)
class ServedModel:
    """A model on engines, as every gateway process has it."""

    name: str
    path: Path
    settings: ModelSettings
    renderer: ChatRenderer
    pool: EnginePool
    recorder: Recorder
    routers: RouterShape | None
    """The routers whose experts are recorded for each token (`router_replay`); None: they are not."""

    def mask_reason(self, model: str) -> str:
        """Return the reason why nothing that this model samples is trained in an episode of `model`; empty if it is."""
        if not self.settings.train:
            return "frozen_model"
        return "" if self.name == model else "other_model"


@dataclass(slots=True)
class LocalModel(ServedModel):
    """A model on engines as the coordinator has it, with its versions."""

    versions: Versions


@dataclass(slots=True)
class TrainedModel(LocalModel):
    """A model with a trainer."""

    ledger: StoredLedger
    leases: Leases
    batches: Batches


class Models:
    """Every model, by name."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.local: dict[str, ServedModel] = {}
        """The models on engines."""
        self.upstream: dict[str, Upstream] = {}
        self._names = {
            alias: name for name, model in settings.models.items() for alias in (name, *(model.aliases or ()))
        }
        self.projects = Projects(settings)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.local.values())

    def resolve(self, name: str, own: str) -> ServedModel | Upstream:
        """Resolve `name`, requested in an episode of the model `own`. Raise NotFound.

        Unknown names resolve to the episode's model, unless an alias redirects them. The name of a model outside the episode's
        reach counts as unknown, so that no key reveals that such a model exists.
        """
        known = (self._names.get(name), self._names.get("*"))
        found = next((some for some in known if some and self.projects.callable(some, own)), None)
        if found is None and own and "*" in self._settings.aliases_of(own):
            found = own
        if found is None:
            raise NotFound(f"the model {name!r} does not exist", code="model_not_found", param="model")
        return self.upstream.get(found) or self.local[found]

    def first(self, reach: Reach) -> str:
        """Return the first trained model within reach; empty: none."""
        return next((name for name in reach.models if self._settings.models[name].train), "")

    def names(self, visible: Callable[[str], bool] = lambda _model: True) -> list[str]:
        """Return every name and alias of the visible models, without `*`."""
        return [name for name, model in self._names.items() if name != "*" and visible(model)]


class CoordinatorModels:
    """Every model on engines as the coordinator has it, by name."""

    def __init__(self, models: Models, found: Iterable[LocalModel]) -> None:
        self._models = models
        self._local = {model.name: model for model in found}

    def __iter__(self) -> Iterator[LocalModel]:
        return iter(self._local.values())

    @property
    def trained(self) -> list[TrainedModel]:
        return [model for model in self if isinstance(model, TrainedModel)]

    def get(self, name: str | None, reach: Reach | None = None) -> LocalModel:
        """Return a model by its name, or the first trained one. Raise NotFound.

        `reach`: the admin key's reach; models outside it do not exist for the key.
        """
        reach = reach or self._models.projects.root
        model = self._local.get(name or self._models.first(reach))
        if model is None or not reach.has(model.name):
            known = ", ".join(known for known in self._local if reach.has(known))
            raise NotFound(f"no model {name!r} has engines here; there are: {known}", code="model_not_found")
        return model

    def get_trained(self, name: str | None = None, reach: Reach | None = None) -> TrainedModel:
        """Return a trained model; without a name the first. `reach`: see `get`. Raise NotFound or BadRequest."""
        model = self.get(name, reach)
        if not isinstance(model, TrainedModel):
            message = f"the model {model.name!r} is frozen ([models.{model.name}] train = false)"
            raise BadRequest(message, code="model_frozen", param="model")
        return model
