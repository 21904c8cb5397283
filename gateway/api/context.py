"""The state that routes share: the services that `services.py` opened, keys as they are sent, and bodies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import orjson
from annotated_types import Interval
from fastapi import Depends, Request

from gateway.bus.base import Bus
from gateway.control.host import ControlHost
from gateway.control.lengths import Lengths
from gateway.control.models import Models
from gateway.control.nodes import Nodes
from gateway.control.placement import ControlPlacement
from gateway.dialects.sizes import check_sizes
from gateway.episodes.callers import Callers
from gateway.episodes.episodes import Episodes
from gateway.episodes.open_episode import OpenEpisode
from gateway.errors import BadRequest, Unavailable
from gateway.json_depth import TooDeep, check_depth
from gateway.metrics import Metrics
from gateway.peers import snapshot
from gateway.peers.callers import RemoteCallers
from gateway.peers.follower import Follower
from gateway.peers.hub import Hub
from gateway.peers.membership import Membership
from gateway.render.yielding import LARGE, yielding
from gateway.rollout.replies import Replies
from gateway.sections import RequestSettings
from gateway.settings import Settings
from gateway.store.database import Database
from gateway.tenancy.limits import Limits

_CONVERSATION = ("messages", "input", "prompt", "system")


@dataclass(slots=True)
class Control:
    """The parts that only the coordinator has."""

    host: ControlHost
    episodes: Episodes
    callers: Callers
    fence: int
    hub: Hub | None
    """The other gateway processes; None: it is alone."""
    nodes: Nodes
    placements: dict[str, ControlPlacement]
    """By model."""


@dataclass(slots=True)
class Services:
    """Everything that lives as long as the gateway process."""

    settings: Settings
    database: Database
    models: Models
    replies: Replies
    metrics: Metrics
    bus: Bus
    control: Control | None = None
    """While this process is the coordinator."""
    membership: Membership | None = None
    """In a cluster, as the following."""
    follower: Follower | None = None
    remote: RemoteCallers | None = None
    hub: Hub | None = None
    """The endpoint that followers link to; it exists before all of `control` does."""
    lengths: Lengths | None = None
    """Predictions of calls' lengths; None with `[lengths] ranker = "none"`."""
    limits: Limits = field(init=False)
    """The usage of each key in this process."""

    def __post_init__(self) -> None:
        self.limits = Limits(self.settings, self.models.projects)

    @property
    def callers(self) -> Callers | RemoteCallers:
        """Resolves keys to callers. Raises Unavailable."""
        return self.remote if self.control is None and self.remote is not None else self.decides.callers

    @property
    def host(self) -> ControlHost:
        """The control program. Raises Unavailable if it is elsewhere."""
        return self.decides.host

    @property
    def episodes(self) -> Episodes:
        """Every open episode. Raises Unavailable if they are elsewhere."""
        return self.decides.episodes

    @property
    def decides(self) -> Control:
        """The coordinator's parts. Raises Unavailable in another process."""
        if self.control is None:
            message = "this gateway process is not the coordinator"
            raise Unavailable(message, retry_after=1.0, code="no_coordinator")
        return self.control

    def described(self, control: Control) -> dict[str, Any]:
        """The coordinator's view of its cluster."""
        url = self.settings.cluster.url or self.settings.server.url
        pools = [model.pool for model in self.models]
        return snapshot.described(control.fence, url, control.hub, pools)

    def running(self) -> list[OpenEpisode]:
        """The episodes that may have calls in this process."""
        if self.control is not None:
            return self.control.episodes.live()
        return list(self.follower.episodes.values()) if self.follower is not None else []


async def services(request: Request) -> Services:
    """The services of the gateway that got this request. Async, as a plain function would run in a thread."""
    return cast(Services, request.app.state.services)


def bearer(request: Request) -> str:
    """The key in the Authorization header; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def credentials(request: Request) -> str:
    """The caller's key: as OpenAI's clients send it, or as Anthropic's do."""
    return bearer(request) or request.headers.get("x-api-key", "").strip()


def json_object(body: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises BadRequest."""
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    try:
        check_depth(values)
    except TooDeep as error:
        raise BadRequest(f"the body: {error}", code="body_too_deep") from error
    return values if len(body) < LARGE else {**values, **_rewritten(values)}


def _rewritten(values: dict[str, Any]) -> dict[str, Any]:
    """The parts of a large body that are written as JSON again: schemas of all kinds."""
    return {name: yielding(value) for name, value in values.items() if name not in _CONVERSATION}


def asked_object(body: bytes, most: RequestSettings) -> dict[str, Any]:
    """Reads a body as a JSON object that names a model and holds no more than `most`. Raises BadRequest."""
    values = json_object(body)
    check_sizes(values, most)
    if not isinstance(values.get("model"), str):
        raise BadRequest("model: Field required", code="invalid_value", param="model")
    return values


Gateway = Annotated[Services, Depends(services)]
Number = Annotated[int, Interval(gt=-(2**53), lt=2**53)]
"""An integer as far as every reader of JSON knows them; the store, and sums with it, hold more."""
