"""The routes by which tokens are asked for, without what FastAPI does around a route's function.

They are declared to FastAPI as all others are, so that the schema describes them; these stand in front and call the same
functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.api import chat, completions, messages, responses
from gateway.api.context import Services, services
from gateway.api.generation import leave

Endpoint = Callable[[Request, Services], Awaitable[Response]]


class Express:
    """One route's function, as an ASGI application."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        request = Request(scope, receive)
        try:
            try:
                response = await self._endpoint(request, await services(request))
            except ClientDisconnect:  # it had not even said all, so nothing was begun
                return
            await response(scope, receive, send)
        finally:
            leave(scope)


def routes() -> list[Route]:
    """To be put before all others."""
    found: dict[str, Endpoint] = {
        "/v1/chat/completions": chat.chat_completions,
        "/v1/completions": completions.completions,
        "/v1/responses": responses.create_response,
        "/v1/messages": messages.create_message,
    }
    return [Route(path, Express(endpoint), methods=["POST"]) for path, endpoint in found.items()]
