"""Keys of a request's ASGI scope under which middleware and routes keep what belongs to the request."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

from starlette.types import Scope

from gateway.episodes.refusals import RequestedCall
from gateway.tenancy.limits import Ticket

PREFIX = "/e/"
"""The beginning of a path that names an episode."""
EPISODE = "headgate.episode"
"""The id of the episode that the path names."""
_TICKETS = "headgate.held"
_CALL = "headgate.call"


def hold(scope: Scope, tickets: ExitStack) -> Scope:
    """Return the scope with the stack whose contexts end when the request has been served."""
    return {**scope, _TICKETS: tickets}


def keep_ticket(scope: Scope, ticket: Ticket) -> None:
    """Release the ticket when the request has been served, however that ends."""
    cast(ExitStack, scope[_TICKETS]).enter_context(ticket)


def keep_call(scope: Scope, call: RequestedCall) -> None:
    """Keep the call of a request; a refusal of the request is then a part of the call's episode."""
    scope[_CALL] = call


def call_of(scope: Scope) -> RequestedCall | None:
    """Return the call of the request; None if it has none, or its caller is unknown."""
    return scope.get(_CALL)
