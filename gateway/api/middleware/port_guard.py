"""Serves each route only at its own port. Pure ASGI, around everything else.

With [admin] port, only that port serves the admin API, the console, the metrics and the health checks; other ports have no such
routes. The port that took the connection decides, never a header of the request. The other gateway processes of a cluster
forward admin requests to any port, under the cluster's key.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.api.middleware.episode_prefix import split
from gateway.api.middleware.hop import was_forwarded
from gateway.api.wrong_paths import no_route
from gateway.config.settings import Settings
from headgate.keys import Keyring

_BEHIND = ("/admin", "/console", "/metrics")
_EVERYWHERE = ("/healthz", "/readyz", "/health", "/ping")


class PortGuard:
    """Lets a request in where it may be served."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._port = settings.admin.port
        self._url = settings.server.url
        key = settings.cluster.key
        self._keys = Keyring([(key.get_secret_value(), True)] if key is not None else [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._port is None or scope["type"] == "lifespan" or self._lets_in(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 4404})
            return
        error = no_route(scope["method"], scope["path"], self._url)
        await error_response(error, scope["path"])(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        _, path = split(scope["path"])
        if _below(path, _EVERYWHERE):
            return True
        server = scope.get("server")
        if server is not None and server[1] == self._port:
            return _below(path, _BEHIND)
        return not _below(path, _BEHIND) or was_forwarded(scope, self._keys)


def _below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)
