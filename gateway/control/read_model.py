"""The data of the console: those of the coordinator, or of a recorded run, which has neither engines nor open episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.control.models import Models, ServedModel, TrainedModel
from gateway.control.nodes import NodeDescription, TrainedBatch
from gateway.control.version_records import VersionRecords
from gateway.tenancy.projects import Reach
from gateway.training_feed.batches import Batches
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import StoredLedger
from headgate.errors import NotFound
from scheduler.policies.overdue import SlowEpisode


@dataclass(slots=True)
class RecordedModel(ServedModel):
    """A trained model, as its store has it."""

    versions: VersionRecords
    ledger: StoredLedger
    leases: Leases
    batches: Batches


ShownModel = TrainedModel | RecordedModel


class ConsoleView(Protocol):
    """What the admin API's routes that read show. Names of models that are out of reach do not exist."""

    def served_models(self) -> Sequence[ServedModel]:
        """Return every model on engines."""
        ...

    def trained_model(self, name: str | None, reach: Reach) -> ShownModel:
        """Return a trained model; without a name the first. Raise NotFound or BadRequest."""
        ...

    def versions(self, name: str | None, reach: Reach) -> VersionRecords:
        """Return the versions of a model; without a name of the first trained one. Raise NotFound."""
        ...

    def open_models(self) -> Sequence[str]:
        """Return the model of each open episode."""
        ...

    def slow_episodes(self, model: str) -> Sequence[SlowEpisode]:
        """Return the training episodes of a model that have used up half of their time."""
        ...

    def rollout_seconds(self, model: str) -> Mapping[str, float]:
        """Return what a model's engines and episodes spent their time on (`scheduler.policies.limits.RolloutSeconds`)."""
        ...

    def waiting(self, model: str) -> Mapping[str, int]:
        """Return the number of episodes of each group that wait for a slot."""
        ...

    def trained_batch(self, model: str) -> TrainedBatch | None:
        """Return the batch that a model's trainer trained last, where that is known."""
        ...

    def speeds(self, model: str) -> Mapping[str, Any]:
        """Return the coefficients of each engine's speed."""
        ...

    def described_nodes(self) -> Sequence[NodeDescription]:
        """Describe every node."""
        ...


class ReadModel:
    """A recorded run, as its store has it."""

    def __init__(self, models: Models, recorded: Sequence[RecordedModel]) -> None:
        self._models = models
        self._recorded = {model.name: model for model in recorded}

    def served_models(self) -> Sequence[ServedModel]:
        return list(self._recorded.values())

    def trained_model(self, name: str | None, reach: Reach) -> RecordedModel:
        model = self._recorded.get(name or self._models.first(reach))
        if model is None:
            known = ", ".join(self._recorded)
            raise NotFound(f"no model {name!r} was trained here; there are: {known}", code="model_not_found")
        return model

    def versions(self, name: str | None, reach: Reach) -> VersionRecords:
        return self.trained_model(name, reach).versions

    def open_models(self) -> Sequence[str]:
        return ()

    def slow_episodes(self, model: str) -> Sequence[SlowEpisode]:
        return ()

    def rollout_seconds(self, model: str) -> Mapping[str, float]:
        return {}

    def waiting(self, model: str) -> Mapping[str, int]:
        return {}

    def trained_batch(self, model: str) -> TrainedBatch | None:
        return None

    def speeds(self, model: str) -> Mapping[str, Any]:
        return {}

    def described_nodes(self) -> Sequence[NodeDescription]:
        return ()
