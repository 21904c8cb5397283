"""The application: `create_app(settings)`. Its lifespan opens and closes the services of `services.py`."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from gateway.api import console, errors, health
from gateway.api.admin import cluster, deletions, history, peers, run_files, trainer_steps
from gateway.api.admin.shown import SHOWN
from gateway.api.context import Services
from gateway.api.live_metrics import LiveMetrics
from gateway.api.middleware.body_limit import BodyLimit
from gateway.api.middleware.drain import Drain, Draining, stopping
from gateway.api.middleware.episode_prefix import EpisodePrefix
from gateway.api.middleware.fast_path import FastPath
from gateway.api.middleware.forward import CoordinatorRef, Forward
from gateway.api.middleware.head import Head
from gateway.api.middleware.port_guard import PortGuard
from gateway.api.middleware.web_guard import WebGuard, own_names
from gateway.api.scope import Release
from gateway.api.v1 import chat, completions, feedback, images, messages, models, responses
from gateway.config.settings import ConfigError, Settings
from gateway.episodes.callers import agent_keys
from gateway.services import open_services
from gateway.tenancy.projects import Projects
from headgate.errors import GatewayError

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI's own telemetry checks at each request whether it is configured; the gateway has metrics of its own."""
_COLLECT_EVERY = (10_000, 10, 1_000)
"""Python's own figures (700, 10, 10) suit programs that make fewer objects than one request here. More objects per collection
would have the event loop wait for a collection, and for a JSON reader in a thread (`release_gil_on_gc`)."""


def create_app(settings: Settings, lost: Callable[[BaseException], None] | None = None) -> FastAPI:
    """Return a gateway; nothing is opened before the application starts. `lost`: see `open_services`."""

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
            services.metrics.registry.register(LiveMetrics(services, drain))
            # Tokenizers and schemas live as long as the process: without this, every full collection walks them again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_COLLECT_EVERY)
            if release_gil_on_gc not in gc.callbacks:
                gc.callbacks.append(release_gil_on_gc)
            yield

    app = FastAPI(
        title="headgate",
        version=version("headgate"),
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
        redirect_slashes=False,  # the address of a redirection would be built from the request's Host
    )
    app.state.drain = drain = Drain()
    app.state.refusal = None  # the reason why the services could not be opened, for people
    app.router.routes.extend(_routes())
    console.install(app)
    errors.install(app)
    for middleware in reversed(_middleware(app, settings)):
        app.add_middleware(middleware.cls, *middleware.args, **middleware.kwargs)
    return app


@cache
def _routes() -> list[BaseRoute]:
    """Return the routes of every application, made once: at their first request FastAPI works out what each takes, which is
    slow."""
    routes = FastAPI(openapi_url=None, telemetry=_NO_TELEMETRY)
    for module in (chat, completions, responses, messages, models, feedback):
        routes.include_router(module.router)
    for module in (*SHOWN, deletions):
        routes.include_router(module.router)
    for module in (images, trainer_steps, run_files, history, health, peers, cluster):
        routes.include_router(module.router)
    return routes.router.routes


def release_gil_on_gc(_phase: str, _info: dict[str, int]) -> None:
    """Let other threads run at each garbage collection, so that reading a large JSON body in C does not hold the GIL.

    The interpreter releases the GIL before it calls Python code, even code that does nothing.
    """


def _middleware(app: FastAPI, settings: Settings) -> list[Middleware]:
    """Return the middleware around the routes, from outer to inner."""
    return [
        Middleware(BodyLimit, limit=settings.server.body_limit_bytes),
        Middleware(PortGuard, settings=settings),
        *_web_guard(settings),
        Middleware(Draining, drain=app.state.drain),
        *_forward(app, settings),
        Middleware(Release),
        Middleware(EpisodePrefix),
        Middleware(Head),
        Middleware(FastPath),
    ]


def _web_guard(settings: Settings) -> list[Middleware]:
    """Return the check of web pages, where no admin key keeps them out."""
    if settings.admin.key is not None:
        return []
    member = settings.cluster.member
    return [Middleware(WebGuard, own=own_names(settings), cluster_key=member.key if member else None)]


def _forward(app: FastAPI, settings: Settings) -> list[Middleware]:
    """Return forwarding to the coordinator, in a cluster."""
    if (member := settings.cluster.member) is None:
        return []
    return [
        Middleware(
            Forward, place=partial(_place, app), agents=agent_keys(settings), projects=Projects(settings), key=member.key,
            wait_s=settings.queue.max_wait_s,
        )
    ]  # fmt: skip


async def end_calls(services: Services) -> None:
    """End every running call and every stream of events: clients receive an error, and sampled tokens are recorded."""
    await services.events.close()
    for upstream in services.models.upstream.values():
        await upstream.end(stopping())
    await services.replies.close()


async def leave(services: Services) -> None:
    """Give up this process's place in its cluster while it still responds requests.

    It refuses what others have just sent here as not begun, so they send it to the next coordinator; a closed connection would
    leave them in doubt. Close the links first, so that followers do not see engine changes made during shutdown.
    """
    services.hub.close()
    await services.membership.close()


def _place(app: FastAPI) -> CoordinatorRef:
    membership: CoordinatorRef = app.state.services.membership
    return membership
