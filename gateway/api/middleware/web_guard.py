"""Refuses web pages of other sites while the gateway has no admin key (`headgate/web_pages.py`). Pure ASGI.

Requests that another process of the cluster forwards were checked there, and carry its cluster key.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.api.middleware.episode_prefix import split
from gateway.api.middleware.hop import was_forwarded
from gateway.config.settings import Settings
from headgate.errors import Forbidden
from headgate.keys import Keyring
from headgate.web_pages import OwnNames, check_web_page

_PAGE = "/console"
"""The console without its data: files that are the same everywhere."""


class WebGuard:
    """Lets a request in unless it may come from a web page of another site."""

    def __init__(self, app: ASGIApp, own: OwnNames, cluster_key: str | None = None) -> None:
        self._app = app
        self._own = own
        self._cluster = Keyring([(cluster_key, True)] if cluster_key is not None else [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] != "lifespan":
                self._check(scope)
        except Forbidden as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 4403})
            else:
                await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if self._cluster and was_forwarded(scope, self._cluster):
            return
        _, path = split(scope["path"])
        linked = scope.get("method") in ("GET", "HEAD") and f"{path}/".startswith(f"{_PAGE}/")
        check_web_page(scope["headers"], self._own, linked=linked)


def own_names(settings: Settings) -> OwnNames:
    """Return the names of a gateway: those at which it listens, and those of its URLs."""
    server, admin, cluster = settings.server, settings.admin, settings.cluster
    remedy = (
        f"use http://127.0.0.1:{admin.port or server.port}, set [server] public_url to the URL that you use, "
        "or set [admin] key"
    )
    hosts = [host for host in (server.host, admin.host) if host]
    urls = [url for url in (server.public_url, cluster.url) if url]
    return OwnNames.of(hosts, urls, remedy)
