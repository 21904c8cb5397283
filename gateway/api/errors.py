"""The one place where errors become HTTP: in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`, or in Anthropic's.

The route decides the form, so a client always gets the form of its own API.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from gateway.api.scope import EPISODE, PREFIX
from gateway.api.wrong_paths import is_doubled, no_route
from headgate.errors import (
    BadRequest,
    Busy,
    Conflict,
    GatewayError,
    NotAccepted,
    Unavailable,
    validation_error,
)

log = logging.getLogger(__name__)

NOT_BEGUN = "x-headgate-not-begun"
"""The header by which another gateway process knows that it may send the request elsewhere (`NotAccepted`)."""
_ANTHROPIC_PATH = re.compile(r"(^|/v1)/+messages(/|$)")
"""Paths of Anthropic's API, also behind a wrong base URL; OpenAI has messages of threads."""
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_PROBE = "/readyz"
"""A route that load balancers and orchestrators request every few seconds: its refusals are not logged as warnings."""


def error_body(error: GatewayError) -> dict[str, Any]:
    """Return an error as OpenAI's API has it."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_error_body(error: GatewayError) -> dict[str, Any]:
    """Return an error as Anthropic's API has it; it has no place for a code or a parameter, so the message names them."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    details = {} if error.details is None else {"details": error.details}
    return {
        "type": "error",
        "error": {"type": _ANTHROPIC.get(error.status, other), "message": error.message, **details},
    }


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_response(error: GatewayError, path: str) -> Response:
    """Return the response to a request to `path`. SDKs retry 409 and 429: only what may succeed later has such a status."""
    headers = dict(error.headers)
    if isinstance(error, Busy):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1)))
    if isinstance(error, Conflict):
        headers["x-should-retry"] = "false"
    if isinstance(error, NotAccepted):
        headers[NOT_BEGUN] = "1"
    body = anthropic_error_body(error) if _ANTHROPIC_PATH.search(path) else error_body(error)
    return Response(orjson.dumps(body), error.status, headers, "application/json")


def refusal(request: Request, error: GatewayError) -> Response:
    """Return the response to a request that raised one of our errors, which is counted."""
    if error.status >= 500:
        log.log(_level(request, error), "%s %s: %s", request.method, request.url.path, error)
    return _counted(request, error)


def _level(request: Request, error: GatewayError) -> int:
    """Return the log level of an error. A temporary one is not an error of the gateway."""
    if not isinstance(error, Unavailable):
        return logging.ERROR
    return logging.INFO if request.url.path == _PROBE else logging.WARNING


def _counted(request: Request, error: GatewayError) -> Response:
    metrics = request.app.state.services.metrics
    metrics.errors.labels(str(error.status), error.code or "").inc()
    return error_response(error, request.url.path)


def _allowed(app: FastAPI, scope: Scope) -> list[str]:
    """Return the methods of all routes with a path; empty if no route has it."""
    found = [
        method
        for method in _METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.router.routes)
    ]
    return [*found[:1], "HEAD", *found[1:]] if "GET" in found else found


def install(app: FastAPI) -> None:
    """Register the handlers."""

    async def gateway_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        return refusal(request, error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _counted(request, validation_error(error.errors(), error.body))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method, path = request.method, request.scope["path"]
        if not is_doubled(path) and (allowed := _allowed(app, request.scope)):
            message = f"{method} {path}: this route has {', '.join(allowed)}"
            headers = {"allow": ", ".join(allowed)}
            return _counted(request, BadRequest(message, code="wrong_method", status=405, headers=headers))
        server = request.app.state.services.settings.server
        prefix = f"{PREFIX}{request.scope[EPISODE]}" if EPISODE in request.scope else ""
        return _counted(request, no_route(method, path, server.url + prefix))

    async def unexpected(request: Request, error: Exception) -> Response:
        log.exception("%s %s", request.method, request.url.path, exc_info=error)
        return _counted(
            request, GatewayError("the gateway failed; see its log for the reason", code="internal_error")
        )

    app.add_exception_handler(GatewayError, gateway_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
