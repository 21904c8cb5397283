"""The application: `create_app(settings)`. Its lifespan opens and closes what `services.py` says."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import (
    batches,
    chat,
    cluster,
    completions,
    engines,
    episodes,
    errors,
    express,
    health,
    messages,
    models,
    nodes,
    peers,
    responses,
    staleness,
    stored,
    weights,
)
from gateway.api.bodies import BodyLimit
from gateway.api.context import Services
from gateway.api.door import Door
from gateway.api.drain import Drain, Draining, stopping
from gateway.api.figures import Figures
from gateway.api.forward import Forward, Place
from gateway.control.callers import agent_keys
from gateway.control.projects import Projects
from gateway.errors import GatewayError
from gateway.services import open_services
from gateway.settings import ConfigError, Settings

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI's own, which asks at each request whether somebody has configured it; the gateway has metrics of its own."""
_COLLECT_EVERY = (10_000, 10, 1_000)
"""Python's own figures (700, 10, 10) are for programs that make fewer objects than one request does here. More objects at once
would have the event loop wait for a collection, and for a JSON reader in a thread (`_let_others_run`)."""


def create_app(settings: Settings, lost: Callable[[BaseException], None] | None = None) -> FastAPI:
    """A gateway; nothing is opened before the application starts. `lost`: see `open_services`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                with drain.opening():
                    services = await stack.enter_async_context(open_services(settings, lost))
            except (ConfigError, GatewayError) as error:
                app.state.refusal = error
                raise
            app.state.services = services
            services.database.on_commit = services.metrics.committed
            services.metrics.registry.register(Figures(services, drain))
            # Tokenizers and schemas live as long as the process: without this, every full collection walks them again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_COLLECT_EVERY)
            if _let_others_run not in gc.callbacks:
                gc.callbacks.append(_let_others_run)
            yield

    app = FastAPI(title="headgate", lifespan=lifespan, telemetry=_NO_TELEMETRY)
    app.state.drain = drain = Drain()
    app.state.refusal = None  # the reason why the services could not be opened, for people
    for module in (chat, completions, responses, messages, stored, models):
        app.include_router(module.router)
    for module in (episodes, batches, staleness, weights, engines, nodes, health, peers, cluster):
        app.include_router(module.router)
    errors.install(app)
    app.add_middleware(express.Express)
    app.add_middleware(EpisodePrefix)
    if settings.cluster.url is not None:
        assert settings.cluster.key is not None
        key = settings.cluster.key.get_secret_value()
        app.add_middleware(
            Forward, place=partial(_place, app), agents=agent_keys(settings), projects=Projects(settings), key=key,
            wait_s=settings.queue.max_wait_s,
        )  # fmt: skip
    app.add_middleware(Draining, drain=drain)
    app.add_middleware(Door, settings=settings)
    app.add_middleware(BodyLimit, limit=settings.server.body_limit_bytes)
    return app


def _let_others_run(_phase: str, _info: dict[str, int]) -> None:
    """Ends the turn of a thread that makes many objects in one call in C, as JSON readers do, at each collection.

    Before Python code, even such as does nothing, the interpreter lets other threads run.
    """


async def end_calls(services: Services) -> None:
    """Ends every call that runs: its client is told so, and what was sampled is recorded."""
    for upstream in services.models.upstream.values():
        await upstream.end(stopping())
    await services.replies.close()


def _place(app: FastAPI) -> Place:
    membership = app.state.services.membership
    assert membership is not None
    return membership


class EpisodePrefix:
    """Takes `/e/{episode_id}` off a path: whoever calls there names the episode. Pure ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path.startswith("/e/") and not path.startswith("/e//"):
            named, _, rest = path[3:].partition("/")
            scope = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode(), "headgate.episode": named}
        await self._app(scope, receive, send)
