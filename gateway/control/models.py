"""The models that this gateway serves, and the names by which agents ask for them.

A trained model has versions and a ledger of its own; a frozen one has engines alone; an upstream one is somebody else's API.
Calls to a model that is not the episode's own are recorded and never trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.control.versions import Versions
from gateway.errors import BadRequest, NotFound
from gateway.feed.batches import Batches
from gateway.feed.leases import Leases
from gateway.feed.ledger import StoredLedger
from gateway.render.renderer import ChatRenderer
from gateway.rollout.pool import EnginePool
from gateway.rollout.upstream import Upstream
from gateway.settings import ModelSettings, Settings
from gateway.trajectories.recorder import Recorder


@dataclass(slots=True)
class LocalModel:
    """A model on engines of its own."""

    name: str
    settings: ModelSettings
    renderer: ChatRenderer
    pool: EnginePool
    recorder: Recorder
    versions: Versions
    ledger: StoredLedger | None
    """None: the model is frozen."""
    leases: Leases | None
    batches: Batches | None

    def mask_reason(self, model: str) -> str:
        """Why nothing that this model samples is trained in an episode of `model`; empty: it is."""
        if self.ledger is None:
            return "frozen_model"
        return "" if self.name == model else "other_model"


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
        self.local: dict[str, LocalModel] = {}
        self.upstream: dict[str, Upstream] = {}
        self._names = {
            alias: name for name, model in settings.models.items() for alias in (name, *(model.aliases or ()))
        }

    def __iter__(self) -> Iterator[LocalModel]:
        return iter(self.local.values())

    @property
    def default(self) -> TrainedModel:
        """The first trained model."""
        return self.trained(None)

    def resolve(self, name: str, own: str) -> LocalModel | Upstream:
        """The model that an agent means by `name` in an episode of the model `own`. Raises NotFound.

        Agents ask for names of their own: unless an alias says otherwise, these mean the episode's model.
        """
        found = self._names.get(name) or self._names.get("*")
        if found is None and "*" in self._settings.aliases_of(own):
            found = own
        if found is None:
            raise NotFound(f"the model {name!r} does not exist", code="model_not_found", param="model")
        return self.upstream.get(found) or self.local[found]

    def one(self, name: str | None) -> LocalModel:
        """A model on engines of this gateway; without a name the first trained one. Raises NotFound."""
        model = self.local.get(name or self._settings.model_name)
        if model is None:
            known = ", ".join(self.local)
            raise NotFound(f"no model {name!r} has engines here; there are: {known}", code="model_not_found")
        return model

    def trained(self, name: str | None) -> TrainedModel:
        """A trained model; without a name the first. Raises NotFound or BadRequest."""
        model = self.one(name)
        if not isinstance(model, TrainedModel):
            message = f"the model {model.name!r} is frozen ([models.{model.name}] train = false)"
            raise BadRequest(message, code="model_frozen", param="model")
        return model

    def names(self) -> list[str]:
        """Every name and alias, `*` apart."""
        return [name for name in self._names if name != "*"]
