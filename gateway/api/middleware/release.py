"""Releases what a request holds, such as its place among its key's calls, when it has been served."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.scope import hold


class Release:
    """Ends a request's contexts after its response, whatever serves it and however that ends. Pure ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as tickets:
            await self._app(hold(scope, tickets), receive, send)
