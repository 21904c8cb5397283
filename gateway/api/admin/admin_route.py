"""Routes of the admin API: what all of them check before their function runs.

Invariants: the key is checked first; a query parameter that the route does not have is refused, since a filter that is ignored
would respond with everything; a body is read by the same reader as under `/v1`, whatever its content type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from gateway.api.access import admin
from gateway.api.context import json_object
from gateway.api.query import check_query, query_names
from gateway.render.offload import offload_read
from headgate.errors import BadRequest

_LONG_NUMBER = re.compile(rb"\d{19}")
_SHOWN = 40
"""Digits of an integer that a message quotes."""
_LEAST, _MOST, _DIGITS = -(2**63), 2**64 - 1, 20
"""Integers that readers of JSON keep exactly: larger ones would become rounded numbers."""


def admin_router(tag: str, prefix: str = "", *dependencies: Callable[..., Any]) -> APIRouter:
    """Return a router for paths below `/admin/v1`. `dependencies`: checks in addition to those of the routes."""
    checks = [Depends(check) for check in dependencies]
    return APIRouter(prefix=f"/admin/v1{prefix}", tags=[tag], dependencies=checks, route_class=AdminRoute)


class AdminRoute(APIRoute):
    """A route with the checks of this module."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = query_names(self.dependant)

        async def checked(request: Request) -> Response:
            await admin(request)
            check_query(request, known)
            if self.body_field is not None:
                body = await request.body()
                request = _ReadRequest(request, await offload_read(body, lambda: _object(body)))
            return await handle(request)

        return checked


class _ReadRequest(Request):
    """A request whose body was read as JSON."""

    def __init__(self, request: Request, values: dict[str, Any]) -> None:
        headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._read = request
        self._values = values

    async def body(self) -> bytes:
        return await self._read.body()

    async def json(self) -> Any:
        return self._values


def _object(body: bytes) -> dict[str, Any]:
    """Read a body as a JSON object. Raise BadRequest, also for an integer that would become a rounded number."""
    values = json_object(body)
    if _LONG_NUMBER.search(body):
        json.loads(body, parse_int=_check_integer)
    return values


def _check_integer(digits: str) -> None:
    if len(digits.lstrip("-")) > _DIGITS or not _LEAST <= int(digits) <= _MOST:
        message = f"the body: the integer {digits[:_SHOWN]} has more than 64 bits"
        raise BadRequest(message, code="invalid_json")
