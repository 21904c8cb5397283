"""The HTTP server of published weights, run by a trainer, or as a mirror on the machine of engines.

    GET  /versions                      the versions that are here, whole
    GET  /versions/7/FILE               a file of one, or a range of it; also manifest.json
    POST /versions/7  {"sources": [..]} fetches it from there, and returns the path on this machine

With a key, every request needs it as `Authorization: Bearer`. Without one, web pages of other sites are refused.
"""

from __future__ import annotations

import hmac
import json

from aiohttp import web

from headgate.errors import GatewayError
from headgate.web_pages import (
    OwnNames,
    check_host,
    check_web_page,
)
from headgate.weights.mirror import Mirror

_MAX_SOURCES = 64
_OWN_NAMES = OwnNames.of((), (), "use http://127.0.0.1:PORT, or set HEADGATE_WEIGHTS_KEY")
"""Without a key only the loopback address is listened at."""


def create_server(mirror: Mirror, key: str | None, keep: int | None = None) -> web.Application:
    """Return the server of an open mirror. `keep`: how many versions stay after a fetch; None: nothing is ever removed."""
    handlers = _Handlers(mirror, keep)
    app = web.Application(middlewares=[_errors, _key_needed(key)], client_max_size=2**16)
    app.router.add_get("/versions", handlers.versions)
    app.router.add_get(r"/versions/{version:\d+}/{file}", handlers.file)
    app.router.add_post(r"/versions/{version:\d+}", handlers.fetch)
    return app


class _Handlers:
    def __init__(self, mirror: Mirror, keep: int | None) -> None:
        self._mirror = mirror
        self._keep = keep

    async def versions(self, _request: web.Request) -> web.Response:
        return web.json_response({"versions": sorted(self._mirror.versions())})

    async def file(self, request: web.Request) -> web.StreamResponse:
        folder, name = self._mirror.path(int(request.match_info["version"])), request.match_info["file"]
        path = folder / name
        if path.resolve().parent != folder.resolve() or not path.is_file():
            return _refusal(404, f"there is no {name!r} of version {request.match_info['version']} here")
        return web.FileResponse(path)

    async def fetch(self, request: web.Request) -> web.Response:
        version = int(request.match_info["version"])
        try:
            sources = json.loads(await request.read())["sources"]
        except (ValueError, KeyError, TypeError):
            sources = None
        if not isinstance(sources, list) or not all(
            isinstance(s, str) and s.startswith("http") for s in sources
        ):
            return _refusal(400, 'the body needs "sources", a list of URLs')
        path = await self._mirror.fetch(version, sources[:_MAX_SOURCES])
        if self._keep is not None:
            await self._mirror.prune(self._keep, version)
        return web.json_response({"version": version, "path": str(path.resolve())})


def _key_needed(key: str | None) -> web.middleware:  # type: ignore[valid-type]
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
        if key is None:
            headers = [(name.lower(), value) for name, value in request.raw_headers]
            check_host(request.raw_path.encode(), headers, required=False)
            check_web_page(headers, _OWN_NAMES)
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if key is not None and not hmac.compare_digest(given, expected):
            return _refusal(401, "the key of this server is needed: Authorization: Bearer KEY")
        return await handler(request)

    return check


@web.middleware
async def _errors(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
    try:
        return await handler(request)
    except GatewayError as error:
        return _refusal(error.status, error.message, error.code)


def _refusal(status: int, message: str, code: str | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status)
