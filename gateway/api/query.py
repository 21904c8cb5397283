"""Query parameters: every route refuses those that it does not have, since one that is ignored changes a response silently."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Annotated, Any

from fastapi import Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from headgate.errors import BadRequest

BETA = "beta"
"""Anthropic's clients send it with every request of their beta API; nothing follows from it."""
Beta = Annotated[str | None, Query(description="Accepted: Anthropic's clients send it.")]


class QueryRoute(APIRoute):
    """A route that checks the names of query parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = query_names(self.dependant)

        async def checked(request: Request) -> Response:
            check_query(request, known)
            return await handle(request)

        return checked


def query_names(dependant: Dependant) -> list[str]:
    """Return the names of the query parameters of a route's function, and of what it depends on."""
    return list(_names(dependant))


def check_query(request: Request, known: Collection[str] = ()) -> None:
    """Raise BadRequest for the first query parameter that is not known."""
    if not request.scope["query_string"]:
        return
    for name in request.query_params:
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no query parameters"
            message = f"Unrecognized query parameter: {name}. {request.method} {request.url.path} {takes}"
            raise BadRequest(message, code="unknown_parameter", param=name)


def _names(dependant: Dependant) -> Iterator[str]:
    for inner in dependant.dependencies:
        yield from _names(inner)
    for param in dependant.query_params:
        yield str(param.alias)
