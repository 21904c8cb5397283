"""What the routes share: the services that `app.py` opened, and who may call the admin API."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated, Any, cast

import orjson
from annotated_types import Interval
from fastapi import Depends, Request

from gateway.control.callers import Callers
from gateway.control.episodes import Episodes
from gateway.control.host import ControlHost
from gateway.control.models import Models
from gateway.errors import BadRequest, NotAuthenticated
from gateway.metrics import Metrics
from gateway.rollout.replies import Replies
from gateway.settings import Settings
from gateway.store.database import Database


@dataclass(slots=True)
class Services:
    """Everything that lives as long as the gateway."""

    settings: Settings
    database: Database
    host: ControlHost
    models: Models
    episodes: Episodes
    callers: Callers
    replies: Replies
    metrics: Metrics


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
    return values


def asked_object(body: bytes) -> dict[str, Any]:
    """A body as a JSON object that names a model. Raises BadRequest."""
    values = json_object(body)
    if not isinstance(values.get("model"), str):
        raise BadRequest("model: Field required", code="invalid_value", param="model")
    return values


async def require_admin(request: Request) -> None:
    """Refuses everyone without the admin key, if there is one."""
    gateway = await services(request)
    key = gateway.settings.admin.key
    if key is None:
        return
    if not hmac.compare_digest(bearer(request).encode(), key.get_secret_value().encode()):
        raise NotAuthenticated("the admin API needs the key of [admin] key", code="invalid_admin_key")


Gateway = Annotated[Services, Depends(services)]
Number = Annotated[int, Interval(gt=-(2**53), lt=2**53)]
"""An integer as far as every reader of JSON knows them; the store, and sums with it, hold more."""
