"""The metrics that are computed when `/metrics` is read: roles, engines, queues, ledgers.

Every process reports itself. Only the coordinator reports what it alone knows (episodes, versions, ledgers, leases), so that sums
and maxima over all processes are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.api.context import Services
from gateway.api.middleware.drain import Drain
from gateway.cluster.follower import Follower
from gateway.cluster.role import Coordinator
from gateway.control.coordinator_placement import ControlPlacement
from gateway.control.models import LocalModel, TrainedModel
from gateway.control.nodes import ROLES, Nodes
from gateway.render.tool_faults import TOOL_FAULTS
from gateway.training_feed.ledger import StoredLedger
from scheduler.policies.throughput import COEFFICIENTS


@dataclass(frozen=True, slots=True)
class LiveMetric:
    """A metric's text and the names of its labels."""

    text: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"


_MODEL, _ENGINE, _NODE = ("model",), ("model", "engine"), ("node", "role")
LIVE_METRICS = {
    "role": LiveMetric("1 for the role of this process in its cluster", ("role",)),
    "linked": LiveMetric("1 if this process follows a coordinator and is linked to it"),
    "stopping": LiveMetric("1 if this process is stopping"),
    "running_calls": LiveMetric("Calls that this process is serving"),
    "store_pending_writes": LiveMetric("Writes that are not committed yet"),
    "store_reachable": LiveMetric("1 if the database responded to the last reads and writes"),
    "bus_unbroken_seconds": LiveMetric(
        "Seconds since a request of this process to the bus failed; infinite if none did"
    ),
    "waiting_calls": LiveMetric("Calls of this process that wait for an engine", _MODEL),
    "engine_state": LiveMetric("1 for the state of an engine, as this process sees it", (*_ENGINE, "state")),
    "engine_streams": LiveMetric("Requests of this process in an engine", _ENGINE),
    "engine_version": LiveMetric("The version that an engine runs; -1: it is not known", _ENGINE),
    "engine_restarts": LiveMetric("Restarts of an engine", _ENGINE),
    "engine_step_seconds": LiveMetric(
        "The coefficients of an engine's decode step, fitted, or the initial ones until then",
        (*_ENGINE, "coefficient"),
    ),
    "engine_step_error": LiveMetric("The median relative error of the fitted steps", _ENGINE),
    "fence": LiveMetric("The coordinator's fence, which grows with every new one"),
    "open_episodes": LiveMetric("Open episodes"),
    "followers": LiveMetric("Processes that are linked to the coordinator"),
    "waiting_episodes": LiveMetric("Episodes that wait for a slot", _MODEL),
    "node_role": LiveMetric("1 for the role of a node", _NODE),
    "node_seconds": LiveMetric("Seconds that a node spent in each role", _NODE, "counter"),
    "version": LiveMetric("The newest live version", _MODEL),
    "bad_versions": LiveMetric("Versions that no engine may run, since the first start", _MODEL),
    "updates": LiveMetric("Weight updates since the start", _MODEL, "counter"),
    "streams_across_updates": LiveMetric("Calls carried across an update", _MODEL, "counter"),
    "ledger_groups": LiveMetric("Groups that the ledger knows, by state", ("model", "state")),
    "ledger_free_slots": LiveMetric("Groups that may start within the staleness bound", _MODEL),
    "ledger_next_batch": LiveMetric("The next batch to train, counted from 0", _MODEL),
    "ledger_broken": LiveMetric("1 if the ledger has stopped, and the gateway must be restarted", _MODEL),
    "lease_held": LiveMetric("1 if a trainer leases the next batch", _MODEL),
    "lease_left_seconds": LiveMetric("Seconds until the lease that is held expires", _MODEL),
}
"""The metrics of this module by name, without `headgate_`."""
LABELS = {
    "api": "`chat`, `completions`, `responses`, `messages`",
    "coefficient": "the field of `[routing.engine_prior]`: per cached token, per batch, per call, always",
    "code": "those of the [error codes](errors.md); empty for none",
    "engine": "the engines' names",
    "fault": "of tool calls: " + ", ".join(f"`{fault}`" for fault in TOOL_FAULTS),
    "finish": "how a call ended: `stop`, `length`, `tool_calls`, `abandoned`, ...",
    "model": "the names of `[models]`",
    "node": "the nodes' names",
    "result": "of a token's route: `recorded`, `missing`, `impossible`",
    "role": "a process's: `alone`, `coordinator`, `follower`, `starting`; a node's: `rollout`, `train`, `switching`, `idle`",
    "state": "an engine's or a group's",
    "status": "of HTTP",
    "type": "of hosted tools, as `[server] hosted_tools` knows them",
}
"""The values that the labels of all metrics may have, `gateway.observe.metrics` included: none comes from a request."""


_ROLES = ("alone", "coordinator", "follower", "starting")
Sample = tuple[tuple[str, ...], float]


class LiveMetrics(Collector):
    """One process's. Everything is read in the event loop's thread."""

    def __init__(self, services: Services, drain: Drain) -> None:
        self._services = services
        self._drain = drain

    def describe(self) -> Iterable[Metric]:
        """Declare no metrics in advance: they are computed at each scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for prometheus_client."""
        yield from self._process()
        yield from self._engines()
        if isinstance(coordinator := self._services.role, Coordinator):
            yield from self._coordinator(coordinator)
            yield from _nodes(coordinator.nodes)
            yield from _speeds(coordinator.placements)
            yield from _versions(list(coordinator.models))
            yield from _ledgers(coordinator.models.trained)

    def _process(self) -> Iterator[Metric]:
        services, database = self._services, self._services.database
        role, followed = services.membership.role, services.role
        yield _figure("role", [((r,), r == role) for r in _ROLES])
        linked = role == "follower" and isinstance(followed, Follower) and followed.linked.is_set()
        yield _one("linked", linked)
        yield _one("stopping", self._drain.stopping)
        yield _one("running_calls", self._drain.running)
        yield _one("store_pending_writes", database.pending)
        yield _one("store_reachable", database.reachable)
        if services.bus.shared:
            yield _one("bus_unbroken_seconds", services.bus.unbroken_s)

    def _engines(self) -> Iterator[Metric]:
        models = list(self._services.models)
        waiting = [((model.name,), model.pool.waiting) for model in models]
        yield _figure("waiting_calls", waiting)
        slots = [(model.name, slot) for model in models for slot in model.pool.slots.values()]
        states = [((model, slot.name, slot.state), 1.0) for model, slot in slots]
        yield _figure("engine_state", states)
        for value in ("streams", "version", "restarts"):
            yield _figure(
                f"engine_{value}", [((model, slot.name), getattr(slot, value)) for model, slot in slots]
            )

    def _coordinator(self, coordinator: Coordinator) -> Iterator[Metric]:
        yield _one("fence", coordinator.fence)
        yield _one("open_episodes", coordinator.episodes.open_count)
        if self._services.membership.role != "alone":
            followers = self._services.hub.describe()
            yield _one("followers", len(followers))
        waiting = [
            ((model.name,), sum(coordinator.episodes.waiting(model.name).values()))
            for model in coordinator.models.trained
        ]
        yield _figure("waiting_episodes", waiting)


def _speeds(placements: Mapping[str, ControlPlacement]) -> Iterator[Metric]:
    """Yield the speed of each engine, as the coordinator has measured it."""
    found = [
        ((model, engine), speed)
        for model, placement in placements.items()
        for engine, speed in placement.describe().items()
    ]
    steps = [((*place, k), speed[k]) for place, speed in found for k in COEFFICIENTS]
    yield _figure("engine_step_seconds", steps)
    fitted = [(place, speed["error"]) for place, speed in found if speed["error"] is not None]
    yield _figure("engine_step_error", fitted)


def _nodes(nodes: Nodes) -> Iterator[Metric]:
    now = [((n.name, role), role == n.role) for n in nodes.nodes.values() for role in ROLES]
    yield _figure("node_role", now)
    spent = [
        ((node.name, role), seconds)
        for node in nodes.nodes.values()
        for role, seconds in node.spent().items()
    ]
    yield _figure("node_seconds", spent)


def _versions(models: Sequence[LocalModel]) -> Iterator[Metric]:
    named = [((model.name,), model.versions) for model in models]
    yield _figure("version", [(name, versions.current.version) for name, versions in named])
    yield _figure("bad_versions", [(name, len(versions.bad_ones)) for name, versions in named])
    yield _figure("updates", [(name, versions.updates) for name, versions in named])
    yield _figure(
        "streams_across_updates", [(name, versions.streams_across_updates) for name, versions in named]
    )


def _ledgers(models: Sequence[TrainedModel]) -> Iterator[Metric]:
    groups = [
        ((model.name, state), count)
        for model in models
        for state, count in sorted(Counter(group.state for group in model.ledger.rule.groups()).items())
    ]
    yield _figure("ledger_groups", groups)
    leases = [(model.name, model.leases.current()) for model in models]
    left = [((name,), lease["left_s"]) for name, lease in leases if lease is not None]
    yield _figure("lease_left_seconds", left)
    yield _figure("lease_held", [((name,), lease is not None) for name, lease in leases])
    for key, value in _LEDGER.items():
        yield _figure(key, [((model.name,), value(model.ledger)) for model in models])


_LEDGER: dict[str, Callable[[StoredLedger], float]] = {
    "ledger_free_slots": lambda stored: stored.rule.free_slots(),
    "ledger_next_batch": lambda stored: stored.rule.next_batch,
    "ledger_broken": lambda stored: stored.broken is not None,
}


def _one(name: str, value: float) -> Metric:
    return _figure(name, [((), value)])


def _figure(name: str, samples: Iterable[Sample]) -> Metric:
    figure = LIVE_METRICS[name]
    kind = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
    family = kind(f"headgate_{name}", figure.text, labels=figure.labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family
