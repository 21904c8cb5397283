"""Opens what only the coordinator has: control program, versions, episodes, leases; and keeps its periodic duties.

All of it works under the fence that SQL gave the process, in addition to the parts that every process has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from gateway.api.context import DataPlane
from gateway.cluster import snapshot
from gateway.cluster.role import Coordinator
from gateway.cluster.rollout_watch import RolloutWatch
from gateway.config.settings import Settings
from gateway.control.canaries import Canaries
from gateway.control.coordinator_placement import ControlPlacement
from gateway.control.engine_events import EngineEvents
from gateway.control.host import CheckCoordinator, ControlHost, ModelEngines
from gateway.control.models import CoordinatorModels, LocalModel, ServedModel, TrainedModel
from gateway.control.nodes import Nodes
from gateway.control.program_settings import lending_deadline_s
from gateway.control.versions import Versions
from gateway.episodes import retention
from gateway.episodes.auto_open import AutoOpen
from gateway.episodes.callers import Callers
from gateway.episodes.conversations import Conversations
from gateway.episodes.episodes import Episodes
from gateway.episodes.erasure import Erasure
from gateway.episodes.late_feedback import LateFeedback
from gateway.grading.base import OwnGateway
from gateway.grading.grading import Grading
from gateway.store.database import Database
from gateway.training_feed.batches import Batches
from gateway.training_feed.groups import GroupReader
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import StoredLedger
from gateway.updates.distribution import Distribution
from gateway.updates.engine_steps import EngineSteps
from headgate.errors import Fenced
from headgate.processes.ports import url_of
from headgate.weights.folders import weight_bytes
from scheduler.policies.throughput import EngineModel

log = logging.getLogger(__name__)
_RETENTION_EVERY_S = 3600.0
"""How often old episodes are searched for: retention counts in days."""
_KEPT_EVENTS = 100_000
"""The newest events that are kept for `/admin/v1/events`, about 300 bytes each."""

TEND_EVERY_S = 1.0
"""The interval of most duties."""
_FORGET_EVERY_S = 10.0
Duty = Callable[[], Awaitable[None]]


@asynccontextmanager
async def open_coordinator(
    plane: DataPlane, fence: int, check_coordinator: CheckCoordinator, *, single: bool
) -> AsyncIterator[Coordinator]:
    """`check_coordinator` is called before each step of an engine.

    `single`: wait until every engine is open, or raise EngineError. In a cluster engines may come later.
    """
    settings, database = plane.settings, plane.database.fenced(fence)
    async with AsyncExitStack() as stack:
        ledgers = await _ledgers(plane, database)
        distributions = {
            model.name: await stack.enter_async_context(
                Distribution(model.name, settings.weights, settings.engine_of(model.name), model.path)
            )
            for model in plane.models
        }
        sizes = {model.name: weight_bytes(model.path) for model in plane.models}
        pinned_s = lending_deadline_s(settings, sizes) / 4
        engines = _engines(plane, distributions, check_coordinator, pinned_s, single)
        host = ControlHost(settings, engines, plane.hub, check_coordinator, sizes)
        stack.push_async_callback(host.close)
        nodes = Nodes(settings, host, ledgers, plane.hub)
        placements = _placements(plane, host)
        host.start()
        for placement in placements.values():
            placement.begin()
            stack.push_async_callback(placement.close)
        nodes.begin()
        plane.hub.set_monitor(host)
        opened = [
            await _open_model(
                settings, model, database, host, ledgers.get(model.name), distributions[model.name]
            )
            for model in plane.models
        ]
        episodes = await _episodes(
            stack, plane, database, ledgers, partial(_engine_version, settings, ledgers, placements)
        )
        await _start_engines(stack, settings, opened, nodes, single)
        openings = AutoOpen(settings, database, episodes, ledgers, plane.redactor.hash_key)
        conversations = Conversations(database, plane.redactor.hash_key)
        callers = Callers(settings, episodes, conversations, openings)
        models = CoordinatorModels(plane.models, opened)
        rollout = RolloutWatch(placements, ledgers, episodes)
        late_feedback = LateFeedback(settings, database, ledgers)
        await late_feedback.load()
        erasure = Erasure(settings, database, episodes, plane.redactor)
        coordinator = Coordinator(
            fence,
            host,
            models,
            episodes,
            callers,
            nodes,
            placements,
            rollout,
            plane.hub,
            erasure,
            late_feedback,
        )
        log.info("ready: %s", settings.server.url)
        # Close the host first: the engines belong to another coordinator by then
        stack.push_async_callback(host.close)
        await stack.enter_async_context(_tended(plane, coordinator, database))
        yield coordinator


async def _ledgers(plane: DataPlane, database: Database) -> dict[str, StoredLedger]:
    """Return the ledger of every trained model, as stored."""
    settings, trained = plane.settings, [model.name for model in plane.models if model.settings.train]
    return {name: await StoredLedger.load(database, settings.staleness_of(name), name) for name in trained}


def _engines(
    plane: DataPlane,
    distributions: Mapping[str, Distribution],
    check_coordinator: CheckCoordinator,
    pinned_s: float,
    single: bool,
) -> dict[str, ModelEngines]:
    settings, found = plane.settings, {}
    for model in plane.models:
        engine = settings.engine_of(model.name)
        steps = EngineSteps(
            model.pool,
            model.settings,
            engine,
            settings.update,
            plane.hub,
            distributions[model.name],
            check_coordinator,
            pinned_s,
            patient=not single,
        )
        found[model.name] = ModelEngines(model.pool, steps, engine)
    return found


def _placements(plane: DataPlane, host: ControlHost) -> dict[str, ControlPlacement]:
    given = plane.settings.routing.engine_prior
    prior = EngineModel(given.s_per_kv_token, given.s_per_batch, given.s_per_call, given.s_per_step)
    return {
        model.name: ControlPlacement(host, model.name, model.pool, plane.hub, prior) for model in plane.models
    }


async def _open_model(
    settings: Settings,
    served: ServedModel,
    database: Database,
    host: ControlHost,
    ledger: StoredLedger | None,
    distribution: Distribution,
) -> LocalModel:
    name = served.name
    parts = (
        *(name, served.path, served.settings, served.renderer),
        *(served.pool, served.recorder, served.routers),
    )
    probed = settings.update.probe
    agents = settings.live_agents_of(name)
    canaries = Canaries(name, settings.update, agents, database, served.pool)
    versions = Versions(name, served.path, database, host, ledger, distribution, canaries, probed=probed)
    if ledger is None:
        return LocalModel(*parts, versions)
    drop = settings.update.orphans == "drop"
    reader = GroupReader(name, settings.staleness_of(name), lambda: versions.untrained(orphans_too=drop))
    leases = await Leases.load(database, ledger, settings.feed, reader)
    return TrainedModel(*parts, versions, ledger, leases, Batches(database, reader))


async def _episodes(
    stack: AsyncExitStack,
    plane: DataPlane,
    database: Database,
    ledgers: Mapping[str, StoredLedger],
    engine_version: Callable[[str], int | None],
) -> Episodes:
    settings, renderers = plane.settings, {model.name: model.renderer for model in plane.models}
    grading = await Grading.open(
        settings.graders, database, renderers, settings.rewards, _own_gateway(settings)
    )
    stack.push_async_callback(grading.close)
    recorders = [model.recorder for model in plane.models]
    episodes = Episodes(
        settings, database, ledgers, recorders, grading, plane.hub, engine_version, plane.redactor
    )
    stack.push_async_callback(episodes.close)
    await episodes.load()
    return episodes


def _engine_version(
    settings: Settings,
    ledgers: Mapping[str, StoredLedger],
    placements: Mapping[str, ControlPlacement],
    model: str,
) -> int | None:
    """Return the version of the engine that admits a group; None where `min_version` is the newest version."""
    if settings.routing.group_version == "newest":
        return None
    rule = ledgers[model].rule
    return placements[model].reactor.admitting(max(rule.next_batch - rule.settings.eta, 0))


def _own_gateway(settings: Settings) -> OwnGateway:
    """Return where this process is reached from this machine, whatever URL agents get."""
    server, admin = settings.server, settings.admin
    url = url_of(server.host, server.port)
    admin_url = url_of(admin.host or server.host, admin.port) if admin.port else url
    return OwnGateway(url, admin_url, admin.key.get_secret_value() if admin.key else None)


async def _start_engines(
    stack: AsyncExitStack, settings: Settings, models: list[LocalModel], nodes: Nodes, wait: bool
) -> None:
    for model in models:
        stack.push_async_callback(model.versions.close)
    await asyncio.gather(
        *(
            m.versions.start(settings.engine_of(m.name), wait=wait, on_nodes=nodes.slots(m.name))
            for m in models
        )
    )


@asynccontextmanager
async def _tended(plane: DataPlane, coordinator: Coordinator, database: Database) -> AsyncIterator[None]:
    """Yield the coordinator's periodic duties."""
    settings = plane.settings
    old = partial(retention.tend, database, settings.retention)
    slots = {model.name: model.pool.slots for model in plane.models}
    engines = EngineEvents(database, slots, coordinator.nodes.nodes)
    health_s = min(settings.engine_of(model.name).health_s for model in plane.models)
    duties: list[tuple[str, Duty, float]] = [
        ("tend-snapshot", partial(_show, plane, coordinator), snapshot.EVERY_S),
        ("tend-episodes", coordinator.episodes.sweep, TEND_EVERY_S),
        ("tend-feedback", coordinator.late_feedback.tend, TEND_EVERY_S),
        ("tend-deletions", coordinator.erasure.tend, TEND_EVERY_S),
        ("tend-engines", coordinator.host.tend, TEND_EVERY_S),
        ("tend-nodes", coordinator.nodes.tend, TEND_EVERY_S),
        *(
            ("tend-placement", placement.read_loads, TEND_EVERY_S)
            for placement in coordinator.placements.values()
        ),
        ("tend-rollout", coordinator.rollout.tend, TEND_EVERY_S),
        ("check-health", coordinator.host.check_health, health_s),
        ("tend-retention", old, _RETENTION_EVERY_S),
        ("tend-contents", coordinator.erasure.expire, _RETENTION_EVERY_S),
        ("engine-events", engines.tend, TEND_EVERY_S),
        ("forget-events", partial(retention.forget_events, database, _KEPT_EVENTS), _FORGET_EVERY_S),
    ]
    tenders = [asyncio.create_task(tend(duty, every_s), name=name) for name, duty, every_s in duties]
    try:
        yield
    finally:
        for tender in tenders:
            tender.cancel()
        await asyncio.wait(tenders)


async def _show(plane: DataPlane, coordinator: Coordinator) -> None:
    if plane.bus.shared:
        await snapshot.keep(plane.bus, plane.described(coordinator.fence))


async def tend(duty: Duty, every_s: float) -> None:
    """Repeat a duty, such as keeping deadlines or looking after engines."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await duty()
        except Fenced as error:
            log.warning("%s: %s", getattr(duty, "__qualname__", duty), error)
        except Exception:
            log.exception("%s failed; it is tried again", getattr(duty, "__qualname__", duty))
