"""Opens what a gateway process is made of, in the order in which it is needed, and closes it in the opposite one.

Every process has the data plane (`open_services`): store, models, engine pools, replies. One at a time is the coordinator and
has the control half too (`open_control`), under the fence that SQL gave it: a process that is alone from its start, one of a
cluster when its turn comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from gateway.api.context import Control, Services
from gateway.bus.base import Process
from gateway.bus.opening import open_bus
from gateway.control.host import CheckLeadership, ControlHost, ModelEngines
from gateway.control.lengths import Lengths
from gateway.control.models import LocalModel, Models, ServedModel, TrainedModel
from gateway.control.nodes import Nodes
from gateway.control.placement import ControlPlacement
from gateway.control.versions import Versions
from gateway.engines.address import check_engines
from gateway.engines.process import check_launch
from gateway.engines.tied import stale_heads
from gateway.episodes import retention
from gateway.episodes.auto_open import AutoOpen
from gateway.episodes.callers import Callers
from gateway.episodes.conversations import Conversations
from gateway.episodes.episodes import Episodes
from gateway.errors import Fenced
from gateway.feed.batches import Batches
from gateway.feed.groups import GroupReader
from gateway.feed.leases import Leases
from gateway.feed.ledger import StoredLedger, check_settings
from gateway.grading.grading import Grading
from gateway.metrics import Metrics
from gateway.peers import snapshot
from gateway.peers.callers import RemoteCallers
from gateway.peers.election import Election
from gateway.peers.follower import Follower
from gateway.peers.hub import Hub
from gateway.peers.membership import Membership
from gateway.render.renderer import check_model, load_renderer
from gateway.rollout.handover import Handover
from gateway.rollout.pace import Pace
from gateway.rollout.peers import NoPeers, Peers
from gateway.rollout.pool import EnginePool
from gateway.rollout.replies import Replies
from gateway.rollout.slot import Slot
from gateway.rollout.steps import EngineSteps
from gateway.rollout.upstream import Upstream
from gateway.settings import ConfigError, Settings
from gateway.store.database import Database
from gateway.trajectories.recorder import Recorder
from scheduler.policies.throughput import EngineModel

log = logging.getLogger(__name__)

_TEND_EVERY_S = 1.0
_GATHER_S = 1.0
"""How long a successor waits for the processes that followed the same coordinator."""


async def check_start(settings: Settings) -> None:
    """Raises ConfigError for what can be known to be wrong before anything is started: a model's folder, an engine's program or
    place, a store that cannot go on under these settings, a missing package."""
    for name, model in settings.models.items():
        if model.path is not None:
            engine = settings.engine_of(name)
            check_model(name, model, loaded=engine.launch == "vllm")
            check_launch(engine)
    await check_engines(settings)
    for warning in await stale_heads(settings):
        log.warning("%s", warning)
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
    """A gateway process: alone, and then it is ready when this is entered; or one of a cluster, which looks for its place.

    `lost` is called when a process of a cluster cannot go on; it ends the process, if nothing else is given.
    """
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(_data_plane(settings))
        if settings.cluster.url is None:
            election = Election(services.database, settings.cluster, _process_name(), settings.server.url)
            fence = await election.seize()
            await stack.enter_async_context(open_control(services, fence, None))
        else:
            await stack.enter_async_context(_joined(services, settings.cluster.url, lost or _end_process))
        yield services


@asynccontextmanager
async def _data_plane(settings: Settings) -> AsyncIterator[Services]:
    """The parts that serve calls."""
    async with AsyncExitStack() as stack:
        database = await Database.open(settings.store)
        stack.push_async_callback(database.close)
        models, pace = Models(settings), Pace(settings.calls.chunks_per_s)
        for name, given in settings.models.items():
            if given.upstream is not None:
                models.upstream[name] = upstream = Upstream(
                    name, given.upstream, database, settings.server.keep_alive_s
                )
                stack.push_async_callback(upstream.close)
            else:
                renderer = await asyncio.to_thread(load_renderer, name, given, settings.render)
                pool = EnginePool(name, settings.queue, settings.update.patience_s, pace)
                shared = settings.cluster.url is not None
                recorder = Recorder(database, renderer, name, shared=shared)
                models.local[name] = ServedModel(name, given, renderer, pool, recorder)
        stack.push_async_callback(_stop_engines, models)
        bus, handover = open_bus(settings.bus), None
        stack.push_async_callback(bus.close)
        if bus.shared:
            handover = Handover(bus, Process(_process_name(), settings.cluster.url or ""), settings.bus)
            await handover.start()
            stack.push_async_callback(handover.close)
        replies = Replies(database, handover)
        stack.push_async_callback(replies.close)
        lengths = await _lengths(settings, models, database)
        if lengths is not None:
            stack.push_async_callback(lengths.close)
        yield Services(settings, database, models, replies, Metrics(), bus, lengths=lengths)


async def _lengths(settings: Settings, models: Models, database: Database) -> Lengths | None:
    if settings.lengths.ranker == "none":
        return None
    try:
        lengths = Lengths(settings.lengths, [model.name for model in models if model.settings.train])
    except ImportError as error:
        raise ConfigError(f"[lengths] ranker: {error}") from error
    await lengths.warm_up(database)
    return lengths


@asynccontextmanager
async def open_control(
    services: Services, fence: int, hub: Hub | None, check_leadership: CheckLeadership | None = None
) -> AsyncIterator[None]:
    """The coordinator's parts, beside the data plane. Without a hub the process is alone, and waits for its engines."""
    settings, models = services.settings, services.models
    database = services.database.fenced(fence)
    async with AsyncExitStack() as stack:
        ledgers = await _ledgers(settings, models, database)
        host = ControlHost(settings, _engines(services, hub, check_leadership), hub, check_leadership)
        stack.push_async_callback(host.close)
        nodes = Nodes(settings, host, ledgers, hub or NoPeers())
        placements = _placements(services, host, hub or NoPeers())
        host.start()
        for placement in placements.values():
            placement.begin()
            stack.push_async_callback(placement.close)
        nodes.begin()
        if hub is not None:
            hub.on_trouble = partial(_look_into, host)
        opened = [
            await _open_model(settings, model, database, host, ledgers.get(model.name))
            for model in list(models)
        ]
        renderers = {model.name: model.renderer for model in models}
        grading = await Grading.open(settings.graders, database, renderers, settings.rewards)
        stack.push_async_callback(grading.close)
        recorders = [model.recorder for model in models]
        episodes = Episodes(settings, database, ledgers, recorders, grading, hub)
        stack.push_async_callback(episodes.close)
        await episodes.load()
        for model in opened:
            stack.push_async_callback(model.versions.close)
        waits = hub is None
        await asyncio.gather(
            *(
                m.versions.start(settings.engine_of(m.name), wait=waits, on_nodes=nodes.slots(m.name))
                for m in opened
            )
        )
        openings = AutoOpen(settings, database, episodes, ledgers)
        callers = Callers(settings, episodes, Conversations(database), openings)
        stack.enter_context(
            _deciding(services, opened, Control(host, episodes, callers, fence, hub, nodes, placements))
        )
        log.info("ready: %s", settings.server.url)
        # Close the host first: the engines belong to another coordinator by then
        stack.push_async_callback(host.close)
        await stack.enter_async_context(
            _tended(services, host, episodes, nodes, placements.values(), database)
        )
        yield


@contextlib.contextmanager
def _deciding(services: Services, opened: list[LocalModel], control: Control) -> Iterator[None]:
    """From now on this process decides; calls that it has as a follower belong to the same episodes as before."""
    served = dict(services.models.local)
    services.models.local.update({model.name: model for model in opened})
    services.control = control
    if services.follower is not None:
        control.episodes.adopt(services.follower.retire())
    if control.hub is not None:
        control.hub.opened(control.episodes)
    try:
        yield
    finally:
        services.control = None
        services.models.local.update(served)


@asynccontextmanager
async def _joined(services: Services, url: str, lost: Callable[[BaseException], None]) -> AsyncIterator[None]:
    """One process of a cluster, reached by the others at `url`."""
    settings, models = services.settings, services.models
    assert settings.cluster.key is not None
    key, name = settings.cluster.key.get_secret_value(), _process_name()
    pools = {model.name: model.pool for model in models}
    follower = Follower(name, url, key, pools, [model.recorder for model in models])
    for model, pool in pools.items():
        pool.on_trouble = partial(follower.trouble, model)
        pool.on_dispute = partial(follower.trouble, model)
    wait_s = settings.queue.max_wait_s
    services.follower, services.remote = follower, RemoteCallers(follower, wait_s)
    election = Election(services.database, settings.cluster, name, url)
    services.membership = Membership(
        election, follower, partial(_lead, services, election), services.bus, wait_s
    )
    services.membership.start(lost)
    stalls = asyncio.create_task(_tend(partial(_report_stalls, services), _TEND_EVERY_S), name="tend-stalls")
    try:
        yield
    finally:
        await services.membership.close()
        stalls.cancel()
        await asyncio.wait({stalls})


@asynccontextmanager
async def _lead(services: Services, election: Election, fence: int) -> AsyncIterator[None]:
    settings = services.settings
    pools = {model.name: model.pool for model in services.models}
    apis = {name: settings.engine_of(name).api for name in pools}
    services.hub = hub = Hub(fence, pools, apis, settings.cluster.ask_s)
    try:
        if services.follower is not None and services.follower.followed:
            # Wait for followers to link, so that their calls that cannot move are known
            await asyncio.sleep(_GATHER_S)
        async with open_control(services, fence, hub, partial(election.check_leadership, fence)):
            try:
                yield
            finally:
                for pool in pools.values():
                    pool.hold("this process is not the coordinator any more")
    finally:
        services.hub = None
        hub.close()


def _placements(services: Services, host: ControlHost, peers: Peers) -> dict[str, ControlPlacement]:
    routing = services.settings.routing
    prior = EngineModel(routing.k1, routing.k2, routing.k3, routing.k4)
    return {
        model.name: ControlPlacement(host, model.name, model.pool, peers, prior) for model in services.models
    }


def _engines(
    services: Services, hub: Hub | None, check_leadership: CheckLeadership | None
) -> dict[str, ModelEngines]:
    settings, found = services.settings, {}
    for model in services.models:
        engine = settings.engine_of(model.name)
        steps = EngineSteps(
            model.pool,
            model.settings,
            engine,
            settings.update,
            hub,
            check_leadership,
            settings.lending.grace_s,
        )
        found[model.name] = ModelEngines(model.pool, steps, engine)
    return found


async def _ledgers(settings: Settings, models: Models, database: Database) -> dict[str, StoredLedger]:
    """The ledger of every trained model, as stored."""
    trained = [model.name for model in models if model.settings.train]
    return {name: await StoredLedger.load(database, settings.staleness_of(name), name) for name in trained}


async def _open_model(
    settings: Settings,
    served: ServedModel,
    database: Database,
    host: ControlHost,
    ledger: StoredLedger | None,
) -> LocalModel:
    name, given = served.name, served.settings
    assert given.path is not None
    parts = name, given, served.renderer, served.pool, served.recorder
    if ledger is None:
        versions = Versions(name, given.path, database, host, None)
        return LocalModel(*parts, versions, None, None, None)
    versions = Versions(name, given.path, database, host, ledger)
    dropped = versions if settings.update.orphans == "drop" else None
    orphans = (lambda: dropped.orphans) if dropped else frozenset
    reader = GroupReader(name, settings.staleness_of(name), orphans)
    leases = await Leases.load(database, ledger, settings.feed, reader)
    return TrainedModel(*parts, versions, ledger, leases, Batches(database, reader))


@asynccontextmanager
async def _tended(
    services: Services,
    host: ControlHost,
    episodes: Episodes,
    nodes: Nodes,
    placements: Collection[ControlPlacement],
    database: Database,
) -> AsyncIterator[None]:
    """The coordinator's periodic duties."""
    settings = services.settings
    old = partial(retention.tend, database, settings.retention)
    health_s = min(settings.engine_of(model.name).health_s for model in services.models)
    tenders = [
        asyncio.create_task(_tend(partial(_show, services), snapshot.EVERY_S), name="tend-snapshot"),
        asyncio.create_task(_tend(episodes.sweep, _TEND_EVERY_S), name="tend-episodes"),
        asyncio.create_task(_tend(host.tend, _TEND_EVERY_S), name="tend-engines"),
        asyncio.create_task(_tend(nodes.tend, _TEND_EVERY_S), name="tend-nodes"),
        *(asyncio.create_task(_tend(p.look, _TEND_EVERY_S), name="tend-placement") for p in placements),
        asyncio.create_task(_tend(host.check_health, health_s), name="check-health"),
        asyncio.create_task(_tend(old, settings.retention.every_s), name="tend-retention"),
    ]
    try:
        yield
    finally:
        for tender in tenders:
            tender.cancel()
        await asyncio.wait(tenders)


async def _show(services: Services) -> None:
    if (control := services.control) is not None and services.bus.shared:
        await snapshot.keep(services.bus, services.described(control))


async def _tend(duty: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Repeats a duty, such as keeping deadlines or looking after engines."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await duty()
        except Fenced as error:
            log.warning("%s: %s", getattr(duty, "__qualname__", duty), error)
        except Exception:
            log.exception("%s failed; it is tried again", getattr(duty, "__qualname__", duty))


async def _report_stalls(services: Services) -> None:
    """Calls that have stalled in an engine are cut; of an engine that says nothing at all the coordinator hears."""
    if services.control is not None or services.follower is None:
        return
    for model in services.models:
        stall_s = services.settings.engine_of(model.name).stall_s
        for slot in model.pool.silent(stall_s):
            services.follower.trouble(model.name, slot, f"no token for {stall_s:g} s ([engine] stall_s)")


def _look_into(host: ControlHost, model: str, slot: Slot, reason: str) -> None:
    """A follower has trouble with an engine: it could not reach it (no reason), or it knows what is wrong."""
    if reason and slot.state == "open":
        host.lose(model, slot.name, reason)
    elif reason:
        return  # reported already
    else:
        host.suspect(model, slot)


async def _stop_engines(models: Models) -> None:
    slots = [slot for model in models for slot in model.pool.slots.values()]
    await asyncio.gather(*(slot.stop() for slot in slots))


def _process_name() -> str:
    return f"{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(4)}-{int(time.time())}"


def _end_process(_error: BaseException) -> None:
    """As whoever stops a process does; whoever started it starts it anew."""
    signal.raise_signal(signal.SIGTERM)
