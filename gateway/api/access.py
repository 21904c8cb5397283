"""Access to the admin API: the root key reaches everything, a project's key only what belongs to its models. A thing out of reach
gets the same response as a thing that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from gateway.api.context import Services, bearer, services
from gateway.control.models import LocalModel, ServedModel, TrainedModel
from gateway.control.read_model import ShownModel
from gateway.store import episodes as statements
from gateway.store import ledger
from gateway.store.records import EpisodeRecord
from gateway.tenancy.projects import Projects, Reach
from headgate.errors import NotAuthenticated, NotFound

_ACCESS = "headgate.access"


@dataclass(frozen=True, slots=True)
class Access:
    """The holder of an admin key, and the models within its reach."""

    gateway: Services
    reach: Reach

    @property
    def models(self) -> list[ServedModel]:
        """Models on engines. Raise Unavailable in a follower."""
        return [model for model in self.gateway.view.served_models() if self.reach.has(model.name)]

    def shown(self, name: str | None) -> ShownModel:
        """Return a trained model to read; without a name the first. Raise NotFound or BadRequest."""
        return self.gateway.view.trained_model(name, self.reach)

    def one(self, name: str | None) -> LocalModel:
        """Return a model on engines; without a name the first trained one. Raise NotFound."""
        return self.gateway.coordinator.models.get(name, self.reach)

    def trained(self, name: str | None) -> TrainedModel:
        """Return a trained model; without a name the first. Raise NotFound or BadRequest."""
        return self.gateway.coordinator.models.get_trained(name, self.reach)

    def called(self, name: str, own: str) -> ServedModel:
        """Return a model on engines that episodes of the model `own` may have called. Raise NotFound."""
        projects = self.gateway.models.projects
        model = self.gateway.models.local.get(name)
        if model is not None and (self.reach.everything or projects.callable(name, own)):
            return model
        return self.one(name)

    async def recorded(self, model: str) -> str:
        """Return the name of a model that is configured, or was trained here in the past. Raise NotFound."""
        if model in self.reach.models or (self.reach.everything and await self._was_trained(model)):
            return model
        message = f"no model {model!r}; there are: {', '.join(self.reach.models)}"
        raise NotFound(message, code="no_model", param="model")

    async def _was_trained(self, model: str) -> bool:
        return await self.gateway.database.read(lambda c: bool(ledger.events(c, model, 1)))

    async def episode(self, episode_id: str) -> EpisodeRecord:
        """Return an episode's row. Raise NotFound."""
        row = await self.gateway.database.read(lambda c: statements.episode(c, episode_id))
        if row is None or not self.reach.has(row["model"]):
            raise NotFound(f"no episode {episode_id!r}", code="no_episode")
        return row


async def admin(request: Request) -> Access:
    """Return the holder of the request's key, which is compared once a request. Raise NotAuthenticated."""
    if (known := request.scope.get(_ACCESS)) is None:
        gateway = await services(request)
        known = request.scope[_ACCESS] = Access(gateway, reached(gateway.models.projects, request))
    return cast(Access, known)


def reached(projects: Projects, request: Request) -> Reach:
    """Return what the key of a request reaches. Raise NotAuthenticated."""
    key = bearer(request)
    reach = projects.reach(key)
    if reach is None:
        sent = request.headers.get("authorization", "").strip()
        if key:
            message = "the key that was sent is neither that in [admin] key nor a project's"
        else:
            why = "; the header has no key behind the word Bearer" if sent else ""
            message = f"the admin API needs the key in [admin] key, as `Authorization: Bearer KEY`{why}"
        raise NotAuthenticated(message, code="invalid_admin_key")
    return reach


Admin = Annotated[Access, Depends(admin)]


async def episode_in_reach(request: Request, access: Admin) -> None:
    """Refuse requests about episodes that are out of reach, before anything else of them is looked at."""
    if not access.reach.everything and (episode_id := request.path_params.get("episode_id")):
        await access.episode(episode_id)
