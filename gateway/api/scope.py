"""What middleware and routes keep in a request's ASGI scope, and its release when the request has been served."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.episodes.refusals import RequestedCall
from gateway.tenancy.limits import Ticket

PREFIX = "/e/"
"""The beginning of a path that names an episode."""
EPISODE = "headgate.episode"
"""The id of the episode that the path names."""
_TICKETS = "headgate.held"
_CALL = "headgate.call"


class Release:
    """Ends a request's contexts after its response, whatever serves it and however that ends. Pure ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as tickets:
            await self._app({**scope, _TICKETS: tickets}, receive, send)


def keep_ticket(scope: Scope, ticket: Ticket) -> None:
    """Release the ticket when the request has been served, however that ends."""
    cast(ExitStack, scope[_TICKETS]).enter_context(ticket)


def keep_call(scope: Scope, call: RequestedCall) -> None:
    """Keep the call of a request; a refusal of the request is then a part of the call's episode."""
    scope[_CALL] = call


def call_of(scope: Scope) -> RequestedCall | None:
    """Return the call of the request; None if it has none, or its caller is unknown."""
    return scope.get(_CALL)
