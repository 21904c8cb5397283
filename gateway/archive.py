"""A recorded run, finished, dead or running elsewhere, shown from its store alone: no engine, no lease, nothing is written.

`create_archive` is the application behind `gateway console --run`: the admin API's routes that read, and the console. Invariants:
- the store is opened as it is, not migrated, and no statement writes to it: a gateway that runs on it does not notice;
- every request that could change something is refused (405, `recorded_run`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from sqlalchemy import Connection, select
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import console, errors, health
from gateway.api.admin import history, run_files, trainer_steps
from gateway.api.admin.shown import SHOWN
from gateway.api.context import DataPlane, Services
from gateway.api.errors import error_response
from gateway.api.middleware.head import Head
from gateway.api.middleware.web_guard import WebGuard
from gateway.api.query import QueryRoute
from gateway.bus.opening import open_bus
from gateway.cluster.membership import SingleProcess
from gateway.cluster.role import CurrentRole
from gateway.config.settings import ConfigError, Settings
from gateway.control.models import Models, ServedModel
from gateway.control.read_model import ReadModel, RecordedModel
from gateway.control.version_records import VersionRecords
from gateway.episodes.refusals import Refusals
from gateway.episodes.untrained import UntrainedNotice
from gateway.generation.pace import Pace
from gateway.generation.pool import EnginePool
from gateway.generation.replies import Replies
from gateway.observe.events import EventFeed
from gateway.observe.metrics import Metrics
from gateway.render.checkpoint import Checkpoint
from gateway.render.detokenizer import TextStream, TokenTexts
from gateway.render.redaction import Redactor
from gateway.render.renderer import ChatRenderer
from gateway.render.special_tokens import ControlTokens
from gateway.render.tool_alarm import ToolAlarm
from gateway.services import hub_of
from gateway.store.database import Database
from gateway.store.models import LedgerEventRow, VersionRow
from gateway.telemetry.base import NoTracing
from gateway.tenancy.limits import Limits
from gateway.training_feed.batches import Batches
from gateway.training_feed.groups import GroupReader
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import EQUALITY, StoredLedger
from gateway.trajectories.recorder import Recorder
from headgate.errors import BadRequest
from headgate.web_pages import OwnNames

_STORE = "gateway.db"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Where a run is."""

    store: str
    """The URL of its database."""
    folders: tuple[Path, ...] = ()
    """Where its trainer's files may be."""


def find_run(folder: Path) -> RecordedRun:
    """Return the store of the run in a folder, or next to a trainer's folder. Raise ConfigError that names what is missing."""
    if not folder.is_dir():
        raise ConfigError(f"--run: no such folder: {folder}")
    for place in (folder, folder.parent):
        found = sorted(place.glob("*.db"))
        if place / _STORE in found:
            found = [place / _STORE]
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ConfigError(
                f"--run: {place} has several stores ({names}): name one with --store sqlite:///PATH"
            )
        is_trainers = (folder / "metrics.jsonl").is_file()
        if found and (place == folder or is_trainers):
            return RecordedRun(f"sqlite:///{found[0]}", (folder, folder / "trainer"))
    raise ConfigError(
        f"--run: {folder} is not a run: there is no store (*.db) in it. Name the folder that [store] url in the gateway's file"
        " points into, or name the store with --store"
    )


def create_archive(run: RecordedRun) -> FastAPI:
    """Return the application that shows a run. Its lifespan opens the store, and raises ConfigError if it cannot be shown."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_archive(run) as services:
            app.state.services = services
            yield

    app = FastAPI(title="headgate, a recorded run", lifespan=lifespan, redirect_slashes=False)
    app.router.route_class = QueryRoute

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Report ready: a recorded run has neither engines nor a role to wait for."""
        return {"status": "ready"}

    # health has the /readyz of a gateway, which comes second
    for module in (*SHOWN, trainer_steps, run_files, history, health):
        app.include_router(module.router)
    console.install(app)
    errors.install(app)
    app.add_middleware(Head)
    app.add_middleware(ReadOnly)
    app.add_middleware(WebGuard, own=OwnNames.of((), (), "use the address that `gateway console` printed"))
    return app


class ReadOnly:
    """Refuses whatever could change something. Pure ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        message = "this is a recorded run: nothing can be changed in it"
        error = BadRequest(message, code="recorded_run", status=405, headers={"allow": "GET, HEAD"})
        await error_response(error, scope["path"])(scope, receive, send)


@asynccontextmanager
async def open_archive(run: RecordedRun) -> AsyncIterator[Services]:
    """Yield the parts that read a run's store. Raise ConfigError."""
    values: dict[str, Any] = {"models": {"-": {"path": "."}}, "store": {"url": run.store}}
    opened = Settings.parse(values, "the run's store", environment=False).store
    database = await Database.open(opened, migrate=False)
    try:
        models = await database.read(_models)
        if not models:
            raise ConfigError("--run: its store is empty: no gateway has served a model from it")
        values = {"models": models, "store": {"url": run.store}, "control": {"recording": None}}
        settings = Settings.parse(values, "the run's store", environment=False)
        plane = await _plane(settings, database, run)
        try:
            yield Services.of(plane, SingleProcess())
        finally:
            await plane.events.close()
    finally:
        await database.close()


def _models(connection: Connection) -> dict[str, dict[str, Any]]:
    """Return the trained models that a store knows, in the form of the configuration, with the bound they were trained under."""
    found: dict[str, dict[str, Any]] = {}
    for model in connection.scalars(select(LedgerEventRow.model).distinct().order_by(LedgerEventRow.model)):
        first = connection.scalar(
            select(LedgerEventRow.event)
            .where(LedgerEventRow.model == model)
            .order_by(LedgerEventRow.seq)
            .limit(1)
        )
        bound = {key: value for key, value in (first or {}).items() if key not in ("type", *EQUALITY)}
        path = connection.scalar(
            select(VersionRow.path).where(VersionRow.model == model).order_by(VersionRow.version).limit(1)
        )
        found[model] = {"path": path or ".", "staleness": bound}
    return found


async def _recorded(settings: Settings, database: Database, served: ServedModel) -> RecordedModel:
    name, staleness = served.name, settings.staleness_of(served.name)
    ledger = await StoredLedger.load(database, staleness, name)
    reader = GroupReader(name, staleness, frozenset)
    return RecordedModel(
        name,
        served.path,
        served.settings,
        served.renderer,
        served.pool,
        served.recorder,
        served.routers,
        versions=VersionRecords(name, served.path, database),
        ledger=ledger,
        leases=await Leases.load(database, ledger, settings.feed, reader),
        batches=Batches(database, reader),
    )


async def _plane(settings: Settings, database: Database, run: RecordedRun) -> DataPlane:
    models, pace = Models(settings), Pace()
    for name, given in settings.models.items():
        assert given.path is not None
        # Prompts are never rendered here, so what reads tokens is enough.
        reader = cast(ChatRenderer, await asyncio.to_thread(read_vocabulary, given.path))
        pool = EnginePool(name, settings.queue, pace)
        recorder = Recorder(database, reader, name)
        models.local[name] = ServedModel(name, given.path, given, reader, pool, recorder, None)
    metrics = Metrics()
    return DataPlane(
        settings=settings, database=database, models=models, current_role=CurrentRole(),
        recorded=ReadModel(models, [await _recorded(settings, database, model) for model in models]),
        replies=Replies(database, None), metrics=metrics,
        tool_alarm=ToolAlarm(metrics.tool_faults), refusals=Refusals(database, metrics.refused_calls),
        untrained=UntrainedNotice(), redactor=Redactor(), tracing=NoTracing(), bus=open_bus(settings.bus),
        hub=hub_of(settings, models),
        events=EventFeed(database), limits=Limits(settings, models.projects),
        run_folders=run.folders,
    )  # fmt: skip


class TokenReader:
    """Reads tokens by a tokenizer, as far as the gateway's routes request it."""

    def __init__(self, tokenizer: Checkpoint) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._texts = TokenTexts(self._backend)
        self.control_ids = ControlTokens(tokenizer, as_text=True).ids

    def text_stream(self) -> TextStream:
        """Return a decoder for one run of tokens."""
        return self._texts.stream()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, marks included."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


class IdReader:
    """Shows ids in place of text, where a run's tokenizer no longer exists."""

    control_ids: frozenset[int] = frozenset()

    def text_stream(self) -> IdReader:
        """Return a decoder for one run of tokens."""
        return self

    def step(self, token: int) -> str:
        """Return the token's number."""
        return f"{token} "

    def end(self) -> str:
        """Nothing is left."""
        return ""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokens' numbers."""
        return " ".join(map(str, ids))


def read_vocabulary(folder: Path) -> TokenReader | IdReader:
    """Return the tokenizer of a checkpoint's folder; ids where it cannot be read."""
    if not folder.is_dir():
        return IdReader()
    try:
        return TokenReader(Checkpoint.read(folder))
    except Exception:  # libraries raise anything; the run is worth looking at without it
        return IdReader()
