"""Projects: tenants, each with a set of models and an admin key that reaches only these.

Owns only the keys of the admin API. Invariants: a trained model is in at most one project, and everything of it (episodes,
groups, batches, leases, versions, engines) is that project's; a frozen or upstream model that no project names is available to
all, one that several projects name is available to these; an episode can call only models that its project reaches, and other
models do not exist for it. Without projects every client reaches every model.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config.settings import Settings
from headgate.keys import Keyring


@dataclass(frozen=True, slots=True)
class Reach:
    """The models that an admin key reaches."""

    project: str
    """Empty: everything."""
    models: tuple[str, ...]
    """The models in the order of the configuration."""

    @property
    def everything(self) -> bool:
        """True for the root key."""
        return not self.project

    def has(self, model: str) -> bool:
        """Return true if a model, and what belongs to it, is within reach; the root key also reaches models that were
        configured in the past."""
        return self.everything or model in self.models


class Projects:
    """The projects, and what each may see."""

    def __init__(self, settings: Settings) -> None:
        self._of: dict[str, frozenset[str]] = {
            model: frozenset(name for name, project in settings.projects.items() if model in project.models)
            for model in settings.models
        }
        self._trained = frozenset(name for name, model in settings.models.items() if model.train)
        self.root = Reach("", tuple(settings.models))
        root = settings.admin.key
        self._open = root is None
        self._reaches = {
            name: Reach(name, tuple(model for model in settings.models if self._owns(name, model)))
            for name in settings.projects
        }
        keys = [(root.get_secret_value(), self.root)] if root is not None else []
        keys += [(p.key.get_secret_value(), self._reaches[name]) for name, p in settings.projects.items()]
        self._keys = Keyring(keys)

    @property
    def any(self) -> bool:
        """True if there are projects."""
        return bool(self._reaches)

    def reach(self, key: str) -> Reach | None:
        """Return the reach of an admin key; None if it is none. Takes the same time for every key."""
        return self.root if self._open else self._keys.find(key)

    def project_of(self, model: str) -> str:
        """Return the project of a trained model, and so of its episodes; empty: none."""
        return next(iter(self._of.get(model, ())), "")

    def callable(self, model: str, own: str) -> bool:
        """Return true if `model` exists for episodes of the model `own`."""
        having, holding = self._of.get(model, frozenset()), self._of.get(own, frozenset())
        if having:
            return bool(having & holding)
        return model not in self._trained or not holding

    def is_visible(self, model: str, reach: Reach) -> bool:
        """Return true if a model exists for the holder of an admin key: it is within reach, or callable in episodes that are."""
        return reach.has(model) or any(
            self.callable(model, own) for own in reach.models if own in self._trained
        )

    def _owns(self, project: str, model: str) -> bool:
        """Return true if only this project has the model. Projects cannot operate shared models, whose engines carry other
        calls too."""
        return self._of[model] == {project}
