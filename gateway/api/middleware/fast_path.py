"""Serves the routes that generate tokens without FastAPI's work around a route's function.

They are also declared to FastAPI, so that the schema describes them; this stands before its routes and calls the same functions.
Errors are returned as FastAPI's handlers would (`errors.py`), after they have become a part of the call's episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.context import Services, services
from gateway.api.errors import refusal
from gateway.api.scope import call_of
from gateway.api.v1 import chat, completions, messages, responses
from headgate.errors import GatewayError

Endpoint = Callable[[Request, Services], Awaitable[Response]]
_ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/responses": responses.create_response,
    "/v1/messages": messages.create_message,
}


class FastPath:
    """Serve these routes here; everything else is the application's. Pure ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = _ENDPOINTS.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        gateway = await services(request)
        try:
            response = await endpoint(request, gateway)
            await response(scope, receive, send)
        except GatewayError as error:  # a response that has begun reports its own errors
            if (call := call_of(scope)) is not None:
                await gateway.refusals.record(call, error)
            await refusal(request, error)(scope, receive, send)
        except ClientDisconnect:  # the request was incomplete, so nothing was begun
            return
