"""The URL prefix `/e/{episode_id}`, by which a caller names the episode of a call."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.scope import EPISODE, PREFIX


def split(path: str) -> tuple[str | None, str]:
    """Return the named episode (None without the prefix) and the path behind it."""
    if not path.startswith(PREFIX) or path.startswith(PREFIX + "/"):
        return None, path
    named, slash, rest = path[len(PREFIX) :].partition("/")
    return named, slash + rest


class EpisodePrefix:
    """Takes the prefix off a path, and keeps the episode's id in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            named, path = split(scope.get("path", ""))
            if named is not None:
                path = path or "/"
                scope = {**scope, "path": path, "raw_path": path.encode(), EPISODE: named}
        await self._app(scope, receive, send)
