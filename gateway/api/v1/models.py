"""`GET /v1/models` and `GET /v1/models/{id}`: in OpenAI's form, or in Anthropic's for clients that name its version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response

from gateway.api.context import Gateway, Services, bearer
from gateway.api.errors import anthropic_error_body
from gateway.api.query import Beta, QueryRoute
from gateway.api.v1.admission import identify
from gateway.api.wrong_paths import no_route
from headgate.errors import BadRequest, NotFound, invalid

router = APIRouter(tags=["OpenAI", "Anthropic"], route_class=QueryRoute)
_ANTHROPIC = "anthropic-version"
_MADE = "1970-01-01T00:00:00Z"
"""The value of Anthropic's API for an unknown date."""


@router.get("/v1/models", response_model=None)
async def list_models(
    request: Request,
    gateway: Gateway,
    limit: int = Query(20, ge=1, le=1000),
    after_id: str | None = None,
    before_id: str | None = None,
    beta: Beta = None,
    client_version: Annotated[str | None, Query(description="Accepted: Codex sends it.")] = None,
) -> dict[str, Any] | Response:
    """Every model, under its own name and its aliases; with [projects], those within the key's reach. Anthropic's clients get
    pages."""
    _, visible = await _sight(request, gateway)
    names = gateway.models.names(visible)
    if _ANTHROPIC not in request.headers:
        return {"object": "list", "data": [_model(name) for name in names]}
    try:
        page, more = _page(names, limit, after_id, before_id)
    except BadRequest as error:
        return _refused(error)
    return {
        "data": [_anthropic_model(name) for name in page],
        "has_more": more,
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


@router.get("/v1/models/{model_id:path}", response_model=None)
async def get_model(
    model_id: str, request: Request, gateway: Gateway, beta: Beta = None
) -> dict[str, Any] | Response:
    """Return one model, by any name under which the key's episodes could call it; without [projects], the first trained one's."""
    if not model_id:
        raise no_route("GET", "/v1/models/", gateway.settings.server.url)
    anthropic = _ANTHROPIC in request.headers
    own, visible = await _sight(request, gateway)
    try:
        if model_id not in gateway.models.names(visible):
            gateway.models.resolve(model_id, own)
    except NotFound as error:
        if anthropic:
            return _refused(error)
        raise
    return _anthropic_model(model_id) if anthropic else _model(model_id)


async def _sight(request: Request, gateway: Services) -> tuple[str, Callable[[str], bool]]:
    """Return the model whose episodes the request is about, and which models are there for them. Without projects: for
    anybody."""
    projects = gateway.models.projects
    if not projects.any:
        return gateway.settings.model_name, lambda _model: True
    if (reach := projects.reach(bearer(request))) is not None:
        return gateway.models.first(reach), lambda model: projects.is_visible(model, reach)
    own = (await identify(request, gateway)).model
    return own, lambda model: projects.callable(model, own)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "headgate"}


def _anthropic_model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": _MADE, "lifecycle": "active"}


def _page(names: list[str], limit: int, after: str | None, before: str | None) -> tuple[list[str], bool]:
    """Return the names after or before one of them, and whether there are more. Raise BadRequest."""
    for param, name in (("after_id", after), ("before_id", before)):
        if name is not None and name not in names:
            raise invalid(param, f"no model has the name {name!r}")
    start = names.index(after) + 1 if after is not None else 0
    end = names.index(before) if before is not None else len(names)
    found = names[start:end]
    page = found[-limit:] if before is not None and after is None else found[:limit]
    return page, len(found) > len(page)


def _refused(error: BadRequest | NotFound) -> Response:
    return Response(orjson.dumps(anthropic_error_body(error)), error.status, media_type="application/json")
