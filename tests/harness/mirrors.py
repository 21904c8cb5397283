"""Servers of weights in the test's event loop, as `gateway mirror` runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from headgate.weights.mirror import Mirror
from headgate.weights.server import create_server

Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def serving(
    directory: Path, key: str | None = None, first: Handler | None = None
) -> AsyncIterator[str]:
    """Yield a server of the versions in a directory. `first` sees every request before it, and may serve it."""
    async with AsyncExitStack() as stack:
        mirror = await stack.enter_async_context(Mirror(directory, key))
        app = create_server(mirror, key)

        @web.middleware
        async def look(request: web.Request, handler: Any) -> web.StreamResponse:
            if first is not None and (response := await first(request)) is not None:
                return response  # type: ignore[no-any-return]
            return await handler(request)  # type: ignore[no-any-return]

        app.middlewares.insert(0, look)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
