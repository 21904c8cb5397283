"""The one place where errors become HTTP, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.errors import BadRequest, Busy, Conflict, GatewayError

log = logging.getLogger(__name__)


def error_body(error: GatewayError) -> dict[str, Any]:
    """An error as OpenAI's API has it."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: GatewayError) -> Response:
    """SDKs retry 409 and 429: only what may succeed later says so."""
    headers = {}
    if isinstance(error, Busy):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1)))
    if isinstance(error, Conflict):
        headers["x-should-retry"] = "false"
    return Response(orjson.dumps(error_body(error)), error.status, headers, "application/json")


def validation_error(errors: Any) -> BadRequest:
    """The first of pydantic's errors, as one of ours."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    if first["type"] in ("json_invalid", "json_type"):
        return BadRequest(f"the body is not JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return BadRequest(
            f"Unrecognized request argument supplied: {where}", code="unknown_parameter", param=where
        )
    return BadRequest(
        f"{where}: {first['msg']}" if where else first["msg"], code="invalid_value", param=where or None
    )


def install(app: FastAPI) -> None:
    """Registers the handlers."""

    def counted(request: Request, error: GatewayError) -> Response:
        metrics = request.app.state.services.metrics
        metrics.errors.labels(str(error.status), error.code or "").inc()
        return error_response(error)

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        if error.status >= 500:
            log.error("%s %s: %s", request.method, request.url.path, error.message)
        return counted(request, error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return counted(request, validation_error(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, GatewayError):  # raised while FastAPI read the body
            return counted(request, error.__cause__)
        kind = BadRequest(f"{request.method} {request.url.path}: {error.detail}", code="no_such_route")
        response = counted(request, kind)
        response.status_code = error.status_code
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        log.exception("%s %s", request.method, request.url.path, exc_info=error)
        return counted(request, GatewayError("the gateway failed; its log says why", code="internal_error"))

    app.add_exception_handler(GatewayError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
