"""The state that routes share: the services that `services.py` opened, keys as they are sent, and bodies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast

import orjson
from annotated_types import Interval
from fastapi import Depends, Request

from gateway.bus.base import Bus
from gateway.cluster import snapshot
from gateway.cluster.hub import Hub
from gateway.cluster.membership import Membership, SingleProcess
from gateway.cluster.role import Coordinator, CurrentRole, Role
from gateway.config.settings import Settings
from gateway.control.host import ControlHost
from gateway.control.models import Models
from gateway.control.read_model import ConsoleView, ReadModel
from gateway.dialects.sizes import check_sizes
from gateway.episodes.callers import AgentCalls, Directory
from gateway.episodes.episodes import Episodes
from gateway.episodes.refusals import Refusals
from gateway.episodes.untrained import UntrainedNotice
from gateway.generation.replies import Replies
from gateway.observe.events import EventFeed
from gateway.observe.metrics import Metrics
from gateway.render.gil import LARGE, release_gil
from gateway.render.redaction import Redactor
from gateway.render.tool_alarm import ToolAlarm
from gateway.store.database import Database
from gateway.telemetry.base import Tracing
from gateway.tenancy.limits import Limits
from headgate.errors import BadRequest, NotAuthenticated, Unavailable, invalid
from headgate.json_depth import MAX_DEPTH, TooDeep, check_depth

_OTHER_HEADERS, _OTHER_QUERY = ("api-key", "x-goog-api-key"), ("key", "api_key", "api-key")
"""Where clients of Azure's and Google's APIs put a key."""
_CONVERSATION = ("messages", "input", "prompt", "system")


@dataclass(slots=True, kw_only=True)
class DataPlane:
    """The parts that every gateway process has, as long as it lives: they serve calls."""

    settings: Settings
    database: Database
    models: Models
    current_role: CurrentRole
    replies: Replies
    metrics: Metrics
    tool_alarm: ToolAlarm
    refusals: Refusals
    redactor: Redactor
    untrained: UntrainedNotice
    bus: Bus
    hub: Hub
    """The links of other processes: while this one leads a cluster."""
    events: EventFeed
    """Those who watch this process."""
    limits: Limits
    """The usage of each key in this process."""
    recorded: ReadModel | None = None
    """The recorded run that is shown; None in a gateway."""
    run_folders: tuple[Path, ...] = ()
    """The folders of recorded runs that are shown, where their trainers' files are looked for first."""
    tracing: Tracing
    """The spans of this process's calls."""

    def described(self, fence: int) -> snapshot.ClusterSnapshot:
        """Return the cluster, as the coordinator with this fence sees it."""
        url = self.settings.cluster.url or self.settings.server.url
        return snapshot.described(fence, url, self.hub, [model.pool for model in self.models])


@dataclass(slots=True, kw_only=True)
class Services(DataPlane):
    """A gateway process: what every one has, its role, and its place among the others."""

    membership: Membership | SingleProcess

    @classmethod
    def of(cls, plane: DataPlane, membership: Membership | SingleProcess) -> Services:
        """Return a process with the same parts and a place in the cluster."""
        parts = {part.name: getattr(plane, part.name) for part in fields(plane)}
        return cls(**parts, membership=membership)

    @property
    def role(self) -> Role:
        """The role that this process has now."""
        return self.current_role.get()

    @property
    def coordinator(self) -> Coordinator:
        """The parts that only the coordinator has. Raise Unavailable in another process."""
        if not isinstance(self.role, Coordinator):
            message = "this gateway process is not the coordinator"
            raise Unavailable(message, retry_after=1.0, code="no_coordinator")
        return self.role

    @property
    def view(self) -> ConsoleView:
        """What the routes that read show. Raise Unavailable in a follower."""
        return self.recorded or self.coordinator

    @property
    def callers(self) -> Directory:
        """Resolve keys to callers."""
        return self.role.callers

    @property
    def agents(self) -> AgentCalls:
        """Open episodes for agents' keys. Raise Unavailable if this process is not the coordinator."""
        return self.coordinator.callers

    @property
    def host(self) -> ControlHost:
        """The control program. Raise Unavailable if it is elsewhere."""
        return self.coordinator.host

    @property
    def episodes(self) -> Episodes:
        """Every open episode. Raise Unavailable if they are elsewhere."""
        return self.coordinator.episodes


async def services(request: Request) -> Services:
    """Return the services of the gateway that got this request. Async, as a plain function would run in a thread."""
    return cast(Services, request.app.state.services)


def bearer(request: Request) -> str:
    """Return the key in the Authorization header; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def credentials(request: Request) -> str:
    """Return the caller's key: as OpenAI's clients send it, or as Anthropic's do."""
    return bearer(request) or request.headers.get("x-api-key", "").strip()


def check_placed(request: Request) -> None:
    """Raise NotAuthenticated if a request without a readable key has one in a place that is not read."""
    form = "send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
    if request.headers.get("authorization", "").strip():
        message = f"the Authorization header has no key behind the word Bearer: {form}"
        raise NotAuthenticated(message, code="missing_api_key")
    headers = [f"the header {name}" for name in _OTHER_HEADERS if name in request.headers]
    for place in (
        *headers,
        *(f"the query parameter {name}" for name in _OTHER_QUERY if name in request.query_params),
    ):
        raise NotAuthenticated(f"a key in {place} is not read: {form}", code="missing_api_key")


def json_object(body: bytes) -> dict[str, Any]:
    """Return a body as a JSON object. Raise BadRequest."""
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(_not_json(body, error), code="invalid_json") from error
    if not isinstance(values, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    _check_fields(values)
    return values if len(body) < LARGE else {**values, **_rewritten(values)}


def _not_json(body: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"the body is not valid UTF-8 JSON: {wrong.reason} at byte {wrong.start}"
    return f"the body is not JSON: {error}"


def _check_fields(values: dict[str, Any]) -> None:
    """Raise BadRequest, which names the field, if one is nested too deep."""
    try:
        check_depth(values)
    except TooDeep:
        for name, value in values.items():
            _check_field(name, value)


def _check_field(name: str, value: Any) -> None:
    try:
        check_depth(value, MAX_DEPTH - 1)
    except TooDeep as error:
        raise BadRequest(f"{name}: {error}", code="body_too_deep", param=name) from error


def _rewritten(values: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a large body that are written as JSON again: schemas of all kinds."""
    return {name: release_gil(value) for name, value in values.items() if name not in _CONVERSATION}


def request_object(body: bytes) -> dict[str, Any]:
    """Read a body as a JSON object that names a model and holds no more than `sizes.MOST`. Raise BadRequest."""
    values = json_object(body)
    check_sizes(values)
    if not isinstance(values.get("model"), str):
        fault = "must be a string" if "model" in values else "Field required"
        raise invalid("model", fault)
    return values


Gateway = Annotated[Services, Depends(services)]
Number = Annotated[int, Interval(gt=-(2**53), lt=2**53)]
"""An integer as far as every reader of JSON knows them; the store, and sums with it, hold more."""


def body_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe the body of a route that reads it itself."""
    definitions = schema.get("$defs", {})

    def inlined(value: Any) -> Any:  # references would resolve against the root of the whole OpenAPI document
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(definitions[value["$ref"].removeprefix("#/$defs/")])
        return {name: inlined(item) for name, item in value.items() if name != "$defs"}

    content = {"application/json": {"schema": inlined(schema)}}
    return {"requestBody": {"required": True, "content": content}}
