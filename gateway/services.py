"""Opens what a gateway process is made of, in the order in which it is needed, and closes it in the opposite one.

Every process has the data plane: store, models, engine pools, replies. One at a time is the coordinator
(`gateway.coordinator`), under the fence that SQL gave it: a single process from its start, one of a cluster when it is elected.
The others follow it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from gateway.api.context import DataPlane, Services
from gateway.bus.base import Process
from gateway.bus.opening import open_bus
from gateway.cluster.election import Election
from gateway.cluster.follower import Follower
from gateway.cluster.hub import Hub
from gateway.cluster.membership import Membership, SingleProcess
from gateway.cluster.role import Coordinator, CurrentRole
from gateway.config import ClusterMember
from gateway.config.settings import Settings
from gateway.control.models import Models, ServedModel
from gateway.control.program_settings import placement_settings
from gateway.coordinator import TEND_EVERY_S, open_coordinator, tend
from gateway.engines.address import check_engines
from gateway.engines.process import check_launch
from gateway.engines.routers import routers_of
from gateway.engines.tied_embeddings import stale_heads
from gateway.episodes.refusals import Refusals
from gateway.episodes.untrained import UntrainedNotice
from gateway.generation.handover import Handover
from gateway.generation.pace import Pace
from gateway.generation.pool import EnginePool
from gateway.generation.replies import Replies
from gateway.observe.events import EventFeed
from gateway.observe.metrics import Metrics
from gateway.observe.redacted_logs import redacted_logs
from gateway.render.model_folder import check_model
from gateway.render.redaction import Redactor
from gateway.render.renderer import load_renderer
from gateway.render.tool_alarm import ToolAlarm
from gateway.store.database import Database
from gateway.store.holder import folder_of, locked
from gateway.telemetry.opening import open_tracing
from gateway.tenancy.limits import Limits
from gateway.training_feed.ledger import check_settings
from gateway.trajectories.recorder import Recorder
from headgate.used_settings import write_used
from scheduler.program.placement import PlacementSettings

log = logging.getLogger(__name__)

_GATHER_S = 1.0
"""Seconds that a successor waits for the processes that followed the same coordinator."""


async def check_start(settings: Settings) -> None:
    """Raise ConfigError for what can be known to be wrong before anything is started: a model's folder, an engine's program or
    place, a store that cannot go on under these settings, a missing package."""
    for name, model in settings.models.items():
        if model.path is not None:
            engine = settings.engine_of(name)
            check_model(name, model, loaded=engine.launch == "vllm")
            routers_of(name, model)
            check_launch(engine)
    await check_engines(settings)
    for warning in await stale_heads(settings):
        log.warning("%s", warning)
    with locked(settings.store.url):
        database = await Database.open(settings.store)
        try:
            for name, model in settings.models.items():
                if model.train:
                    await check_settings(database, settings.staleness_of(name), name)
        finally:
            await database.close()


@asynccontextmanager
async def open_services(
    settings: Settings, lost: Callable[[BaseException], None] | None = None
) -> AsyncIterator[Services]:
    """Yield a gateway process: a single one is ready when this is entered; one of a cluster is elected or follows later.

    `lost` is called when a process of a cluster cannot go on; it ends the process, if nothing else is given.
    """
    async with _data_plane(settings) as plane:
        opening = (
            open_single_process(plane)
            if (member := settings.cluster.member) is None
            else open_cluster_member(plane, member, lost or _end_process)
        )
        async with opening as services:
            yield services


@asynccontextmanager
async def _data_plane(settings: Settings) -> AsyncIterator[DataPlane]:
    async with AsyncExitStack() as stack:
        tracing = open_tracing(settings.telemetry, _process_name())
        stack.push_async_callback(tracing.close)
        stack.enter_context(locked(settings.store.url))
        redactor = await asyncio.to_thread(Redactor, settings.redaction)
        stack.enter_context(redacted_logs(redactor))
        metrics, current_role = Metrics(), CurrentRole()
        database = await Database.open(settings.store, on_commit=metrics.committed)
        stack.push_async_callback(database.close)
        models = await _models(stack, settings, database, current_role, redactor)
        stack.push_async_callback(_stop_engines, models)
        bus, handover = open_bus(settings.bus), None
        stack.push_async_callback(bus.close)
        if bus.shared:
            handover = Handover(bus, Process(_process_name(), settings.cluster.url or ""), settings.bus)
            await handover.start()
            stack.push_async_callback(handover.close)
        replies = Replies(database, handover)
        stack.push_async_callback(replies.close)
        await asyncio.to_thread(_write_settings, settings)
        events = EventFeed(database)
        stack.push_async_callback(events.close)
        yield DataPlane(
            settings=settings,
            database=database,
            models=models,
            current_role=current_role,
            replies=replies,
            metrics=metrics,
            tool_alarm=ToolAlarm(metrics.tool_faults, redact=redactor.text),
            refusals=Refusals(database, metrics.refused_calls, redactor.text),
            redactor=redactor,
            untrained=UntrainedNotice(),
            bus=bus,
            hub=hub_of(settings, models),
            events=events,
            limits=Limits(settings, models.projects),
            tracing=tracing,
        )


def _write_settings(settings: Settings) -> None:
    """Write the settings next to the store, for the console of the recorded run (PostgreSQL has no folder)."""
    if (folder := folder_of(settings.store.url)) is None:
        return
    try:
        write_used(folder, "gateway", settings)
    except OSError as error:
        log.warning("the settings cannot be written for the console of this run: %s", error)


async def _models(
    stack: AsyncExitStack,
    settings: Settings,
    database: Database,
    current_role: CurrentRole,
    redactor: Redactor,
) -> Models:
    models, pace = Models(settings), Pace()
    exclusivity = current_role if settings.cluster.url is not None else None
    for name, given in settings.models.items():
        if given.upstream is not None:
            from gateway.generation.upstream import Upstream  # httpx brings rich and pygments with it

            models.upstream[name] = upstream = Upstream(
                name, given.upstream, database, settings.server.keep_alive_s, redactor
            )
            stack.push_async_callback(upstream.close)
        elif given.path is not None:
            renderer = await asyncio.to_thread(load_renderer, name, given, settings.render)
            if renderer.form is None or not renderer.call_example:
                log.warning(
                    "model %s: tool calls come as text, its template's form of them is not known", name
                )
            pool = EnginePool(name, settings.queue, pace)
            recorder = Recorder(database, renderer, name, exclusivity, redactor)
            models.local[name] = ServedModel(
                name, given.path, given, renderer, pool, recorder, routers_of(name, given)
            )
    return models


def hub_of(settings: Settings, models: Models) -> Hub:
    """Return the links of other processes, of which there are none yet."""
    pools = {model.name: model.pool for model in models}
    apis = {name: settings.engine_of(name).api for name in pools}
    return Hub(pools, apis, settings.cluster.peer_timeout_s)


@asynccontextmanager
async def open_single_process(plane: DataPlane) -> AsyncIterator[Services]:
    election = Election(plane.database, plane.settings.cluster, _process_name(), plane.settings.server.url)
    fence, place = await election.seize(), SingleProcess()
    async with open_coordinator(plane, fence, place.check_coordinator, single=True) as coordinator:
        plane.current_role.enter(coordinator)
        yield Services.of(plane, place)


@asynccontextmanager
async def open_cluster_member(
    plane: DataPlane, member: ClusterMember, lost: Callable[[BaseException], None]
) -> AsyncIterator[Services]:
    """Open one process of a cluster. `lost`: see `open_services`."""
    settings, name, wait_s = plane.settings, _process_name(), plane.settings.queue.max_wait_s
    pools = {model.name: model.pool for model in plane.models}
    recorders = [model.recorder for model in plane.models]
    placement = PlacementSettings.of(placement_settings(settings))
    follower = Follower(name, member.url, member.key, pools, recorders, wait_s, placement)
    for pool in pools.values():
        pool.set_monitor(follower)
    membership = Membership(
        Election(plane.database, settings.cluster, name, member.url), follower, plane.bus, wait_s
    )
    plane.current_role.enter(follower)
    services = Services.of(plane, membership)
    membership.start(partial(_coordinate, services, membership, follower), lost)
    report = partial(_report_stalls, services, follower)
    stalls = asyncio.create_task(tend(report, TEND_EVERY_S), name="tend-stalls")
    try:
        yield services
    finally:
        await membership.close()
        stalls.cancel()
        await asyncio.wait({stalls})


@asynccontextmanager
async def _coordinate(
    services: Services, membership: Membership, follower: Follower, fence: int
) -> AsyncIterator[None]:
    """Make a follower the coordinator. Its calls belong to the same episodes as before."""
    hub = services.hub
    hub.coordinate(fence)
    try:
        if follower.followed:
            # Wait for followers to link, so that their calls that cannot move are known
            await asyncio.sleep(_GATHER_S)
        async with open_coordinator(
            services, fence, membership.check_coordinator, single=False
        ) as coordinator:
            services.current_role.enter(coordinator)
            coordinator.episodes.adopt(follower.retire())
            hub.opened(coordinator.episodes)
            try:
                yield
            finally:
                for model in services.models:
                    model.pool.hold("this process is not the coordinator any more")
                services.current_role.enter(follower)
    finally:
        hub.close()


async def _report_stalls(services: Services, follower: Follower) -> None:
    """Cut stalled calls, and report engines that have gone silent to the coordinator."""
    if isinstance(services.role, Coordinator):
        return
    for model in services.models:
        stall_s = services.settings.engine_of(model.name).stall_s
        for slot in model.pool.silent(stall_s):
            follower.disputed(model.name, slot, f"no token for {stall_s:g} s ([engine] stall_s)")


async def _stop_engines(models: Models) -> None:
    slots = [slot for model in models for slot in model.pool.slots.values()]
    await asyncio.gather(*(slot.stop() for slot in slots))


def _process_name() -> str:
    return f"{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(4)}-{int(time.time())}"


def _end_process(_error: BaseException) -> None:
    """End this process by a signal; its supervisor restarts it."""
    signal.raise_signal(signal.SIGTERM)
