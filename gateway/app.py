"""The composition root: `create_app(settings)`. One lifespan opens and closes everything, in the order in which it is needed."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api import (
    batches,
    chat,
    completions,
    engines,
    episodes,
    errors,
    express,
    health,
    messages,
    models,
    responses,
    staleness,
    stored,
    weights,
)
from gateway.api.context import Services
from gateway.api.drain import Drain, Draining, stopping
from gateway.api.errors import error_response
from gateway.control.callers import Callers
from gateway.control.conversations import Conversations
from gateway.control.episodes import Episodes
from gateway.control.host import ControlHost, ModelEngines
from gateway.control.models import LocalModel, Models, TrainedModel
from gateway.control.openings import Openings
from gateway.control.versions import Versions
from gateway.errors import BadRequest
from gateway.feed.batches import Batches
from gateway.feed.groups import GroupReader
from gateway.feed.leases import Leases
from gateway.feed.ledger import StoredLedger, check_settings
from gateway.grading.grading import Grading
from gateway.metrics import Metrics
from gateway.render.renderer import ChatRenderer
from gateway.rollout.pace import Pace
from gateway.rollout.pool import EnginePool
from gateway.rollout.replies import Replies
from gateway.rollout.steps import EngineSteps
from gateway.rollout.upstream import Upstream
from gateway.settings import Settings
from gateway.store.database import Database
from gateway.trajectories.recorder import Recorder

log = logging.getLogger(__name__)

_TEND_EVERY_S = 1.0
_COLLECT_EVERY = (50_000, 20, 100)
"""Python's own figures (700, 10, 10) are for programs that make fewer objects than one request does here."""


def create_app(settings: Settings) -> FastAPI:
    """A gateway; nothing is opened before the application starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            with drain.opening():
                services = await stack.enter_async_context(open_services(settings))
            app.state.services = services
            # Tokenizers and schemas live as long as the process: without this, every full collection walks them again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_COLLECT_EVERY)
            health_s = min(settings.engine_of(model.name).health_s for model in services.models)
            tenders = [
                asyncio.create_task(_tend(services.episodes.sweep, _TEND_EVERY_S), name="tend-episodes"),
                asyncio.create_task(_tend(services.host.tend, _TEND_EVERY_S), name="tend-engines"),
                asyncio.create_task(_tend(services.host.check_health, health_s), name="check-health"),
            ]
            try:
                yield
            finally:
                for tender in tenders:
                    tender.cancel()
                await asyncio.wait(tenders)

    app = FastAPI(title="headgate", lifespan=lifespan)
    app.state.drain = drain = Drain()
    for module in (chat, completions, responses, messages, stored, models):
        app.include_router(module.router)
    for module in (episodes, batches, staleness, weights, engines, health):
        app.include_router(module.router)
    app.router.routes[:0] = express.routes()
    errors.install(app)
    app.add_middleware(BodyLimit, limit=settings.server.body_limit_bytes)
    app.add_middleware(EpisodePrefix)
    app.add_middleware(Draining, drain=drain)
    return app


async def end_calls(services: Services) -> None:
    """Ends every call that runs: its client is told so, and what was sampled is recorded."""
    for upstream in services.models.upstream.values():
        await upstream.end(stopping())
    await services.replies.close()


async def check_store(settings: Settings) -> None:
    """Raises ConfigError if the store cannot go on under these settings."""
    database = await Database.open(settings.store)
    try:
        for name, model in settings.models.items():
            if model.train:
                await check_settings(database, settings.staleness_of(name), name)
    finally:
        await database.close()


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    """Opens the store, the models and their engines; closes them in the opposite order."""
    async with AsyncExitStack() as stack:
        database = await Database.open(settings.store)
        stack.push_async_callback(database.close)
        models, host = Models(settings), ControlHost(settings, _engines(settings))
        stack.push_async_callback(_stop_engines, host)
        stack.push_async_callback(host.close)
        host.start()
        for name in host.models:
            models.local[name] = await _open_model(settings, name, database, host)
        for name, given in settings.models.items():
            if given.upstream is not None:
                models.upstream[name] = upstream = Upstream(
                    name, given.upstream, database, settings.server.keep_alive_s
                )
                stack.push_async_callback(upstream.close)
        ledgers = {model.name: model.ledger for model in models if isinstance(model, TrainedModel)}
        grading = await Grading.open(
            settings.graders, database, {model.name: model.renderer for model in models}
        )
        stack.push_async_callback(grading.close)
        episodes_ = Episodes(settings, database, ledgers, [model.recorder for model in models], grading)
        stack.push_async_callback(episodes_.close)
        await episodes_.load()
        for model in models:
            stack.push_async_callback(model.versions.close)
        await asyncio.gather(*(m.versions.start(settings.engine_of(m.name)) for m in models))
        replies = Replies(database)
        stack.push_async_callback(replies.close)
        log.info("ready: %s", settings.server.url)
        openings = Openings(settings, database, episodes_, ledgers)
        callers = Callers(settings, episodes_, Conversations(database), openings)
        yield Services(settings, database, host, models, episodes_, callers, replies, Metrics())


def _engines(settings: Settings) -> dict[str, ModelEngines]:
    found, pace = {}, Pace(settings.calls.chunks_per_s)
    for name, model in settings.models.items():
        if model.upstream is None:
            pool, engine = (
                EnginePool(name, settings.queue, settings.update.patience_s, pace),
                settings.engine_of(name),
            )
            found[name] = ModelEngines(pool, EngineSteps(pool, model, engine, settings.update), engine)
    return found


async def _open_model(settings: Settings, name: str, database: Database, host: ControlHost) -> LocalModel:
    given, pool = settings.models[name], host.models[name].pool
    assert given.path is not None
    renderer = await asyncio.to_thread(ChatRenderer.load, given)
    recorder = Recorder(database, renderer, name)
    if not given.train:
        versions = Versions(name, given.path, database, host, None)
        return LocalModel(name, given, renderer, pool, recorder, versions, None, None, None)
    ledger = await StoredLedger.load(database, settings.staleness_of(name), name)
    versions = Versions(name, given.path, database, host, ledger)
    dropped = versions if settings.update.orphans == "drop" else None
    orphans = (lambda: dropped.orphans) if dropped else frozenset
    reader = GroupReader(name, settings.staleness_of(name), orphans)
    leases = await Leases.load(database, ledger, settings.feed, reader)
    batches_ = Batches(database, reader)
    return TrainedModel(name, given, renderer, pool, recorder, versions, ledger, leases, batches_)


async def _stop_engines(host: ControlHost) -> None:
    slots = [slot for model in host.models.values() for slot in model.pool.slots.values()]
    await asyncio.gather(*(slot.stop() for slot in slots))


async def _tend(duty: Callable[[], Awaitable[None]], every_s: float) -> None:
    """What must happen without being asked for: deadlines are kept, and engines are looked after."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await duty()
        except Exception:
            log.exception("%s failed; it is tried again", duty.__qualname__)


class BodyLimit:
    """Refuses bodies over a limit before anything parses them. Pure ASGI."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = BadRequest(
            f"the body is over {self._limit} bytes ([server] body_limit_bytes)", code="body_too_large"
        )
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise error
            return message

        await self._app(scope, limited, send)


class EpisodePrefix:
    """Takes `/e/{episode_id}` off a path: whoever calls there names the episode. Pure ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path.startswith("/e/") and not path.startswith("/e//"):
            named, slash, rest = path[3:].partition("/")
            scope = {
                **scope,
                "path": slash + rest,
                "raw_path": (slash + rest).encode(),
                "headgate.episode": named,
            }
        await self._app(scope, receive, send)
