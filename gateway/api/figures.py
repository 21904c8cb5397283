"""The metrics that are computed when `/metrics` is read: roles, engines, queues, ledgers.

Every process reports itself. Only the coordinator reports what it alone knows (episodes, versions, ledgers, leases), so that sums
and maxima over all processes are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.api.context import Services
from gateway.api.middleware.drain import Drain
from gateway.control.lengths import Lengths
from gateway.control.models import LocalModel, TrainedModel
from gateway.control.nodes import ROLES, Nodes
from gateway.control.placement import ControlPlacement
from gateway.feed.ledger import StoredLedger
from gateway.peers.follower import Follower
from gateway.peers.role import Leader

_ROLES = ("alone", "coordinator", "follower", "starting")
Sample = tuple[tuple[str, ...], float]


class Figures(Collector):
    """One process's. Everything is read in the event loop's thread."""

    def __init__(self, services: Services, drain: Drain) -> None:
        self._services = services
        self._drain = drain

    def describe(self) -> Iterable[Metric]:
        """Declares no metrics in advance: they are computed at each scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics, for prometheus_client."""
        yield from self._process()
        yield from self._engines()
        if isinstance(leader := self._services.role, Leader):
            yield from self._leader(leader)
            yield from _nodes(leader.nodes)
            yield from _speeds(leader.placements)
            yield from _versions(list(leader.models))
            yield from _ledgers(leader.models.trained)

    def _process(self) -> Iterator[Metric]:
        services, database = self._services, self._services.database
        role, followed = services.membership.role, services.role
        yield _gauge(
            "role",
            "1 for the role of this process in its cluster",
            ("role",),
            [((r,), r == role) for r in _ROLES],
        )
        linked = role == "follower" and isinstance(followed, Follower) and followed.linked.is_set()
        yield _one("linked", "1 if this process follows a coordinator and is linked to it", linked)
        yield _one("stopping", "1 if this process is stopping", self._drain.begun)
        yield _one("running_calls", "Calls that this process is answering", self._drain.running)
        yield _one("store_pending_writes", "Writes that are not committed yet", database.pending)
        yield _one(
            "store_reachable", "1 if the database answered the last reads and writes", database.reachable
        )
        if services.bus.shared:
            text = "Seconds since a request of this process to the bus failed; infinite if none did"
            yield _one("bus_unbroken_seconds", text, services.bus.unbroken_s)
        if services.lengths is not None:
            yield from _lengths(services.lengths, [model.name for model in services.models])

    def _engines(self) -> Iterator[Metric]:
        models = list(self._services.models)
        waiting = [((model.name,), model.pool.waiting) for model in models]
        yield _gauge("waiting_calls", "Calls of this process that wait for an engine", ("model",), waiting)
        slots = [(model.name, slot) for model in models for slot in model.pool.slots.values()]
        keys = ("model", "engine")
        yield _gauge(
            "engine_state",
            "1 for the state of an engine, as this process sees it",
            (*keys, "state"),
            [((model, slot.name, slot.state), 1.0) for model, slot in slots],
        )
        for name, text, value in (
            ("engine_streams", "Requests of this process in an engine", "streams"),
            ("engine_version", "The version that an engine runs; -1: it is not known", "version"),
            ("engine_restarts", "Restarts of an engine", "restarts"),
        ):
            found = [((model, slot.name), getattr(slot, value)) for model, slot in slots]
            yield _gauge(name, text, keys, found)

    def _leader(self, leader: Leader) -> Iterator[Metric]:
        yield _one("fence", "The coordinator's fence, which grows with every new one", leader.fence)
        yield _one("open_episodes", "Open episodes", leader.episodes.open_count)
        if self._services.membership.role != "alone":
            followers = self._services.hub.describe()
            yield _one("followers", "Processes that are linked to the coordinator", len(followers))
        waiting = [
            ((model.name,), sum(leader.episodes.waiting(model.name).values()))
            for model in leader.models.trained
        ]
        yield _gauge("waiting_episodes", "Episodes that wait for a slot", ("model",), waiting)


def _speeds(placements: Mapping[str, ControlPlacement]) -> Iterator[Metric]:
    """The coefficients of `scheduler.policies.throughput`: k1 per cached token, k2 per batch, k3 per call, k4 always."""
    found = [
        ((model, engine), speed)
        for model, placement in placements.items()
        for engine, speed in placement.describe().items()
    ]
    keys = ("model", "engine")
    yield _gauge(
        "engine_step_seconds",
        "The coefficients of an engine's decode step, fitted, or the initial ones until then",
        (*keys, "coefficient"),
        [((*place, k), speed[k]) for place, speed in found for k in ("k1", "k2", "k3", "k4")],
    )
    fitted = [(place, speed["error"]) for place, speed in found if speed["error"] is not None]
    yield _gauge("engine_step_error", "The median relative error of the fitted steps", keys, fitted)


def _nodes(nodes: Nodes) -> Iterator[Metric]:
    now = [((n.name, role), role == n.role) for n in nodes.nodes.values() for role in ROLES]
    yield _gauge("node_role", "1 for the role of a node", ("node", "role"), now)
    spent = CounterMetricFamily(
        "headgate_node_seconds", "Seconds that a node spent in each role", labels=("node", "role")
    )
    for node in nodes.nodes.values():
        for role, seconds in node.spent().items():
            spent.add_metric((node.name, role), seconds)
    yield spent


def _lengths(lengths: Lengths, models: Sequence[str]) -> Iterator[Metric]:
    described = [(model, told) for model in models if (told := lengths.describe(model)) is not None]
    for key, text in _LENGTHS:
        known = [((model,), told[key]) for model, told in described if told[key] is not None]
        yield _gauge(f"length_{key}", text, ("model",), known)


def _versions(models: Sequence[LocalModel]) -> Iterator[Metric]:
    current = [((model.name,), model.versions.current.version) for model in models]
    yield _gauge("version", "The newest live version", ("model",), current)
    updates = CounterMetricFamily("headgate_updates", "Weight updates since the start", labels=("model",))
    across = CounterMetricFamily(
        "headgate_streams_across_updates", "Calls carried across an update", labels=("model",)
    )
    for model in models:
        updates.add_metric((model.name,), model.versions.updates)
        across.add_metric((model.name,), model.versions.streams_across_updates)
    yield from (updates, across)


def _ledgers(models: Sequence[TrainedModel]) -> Iterator[Metric]:
    groups = [
        ((model.name, state), count)
        for model in models
        for state, count in sorted(Counter(group.state for group in model.ledger.rule.groups()).items())
    ]
    yield _gauge("ledger_groups", "Groups that the ledger knows, by state", ("model", "state"), groups)
    leases = [(model.name, model.leases.held()) for model in models]
    left = [((name,), lease["left_s"]) for name, lease in leases if lease is not None]
    yield _gauge("lease_left_seconds", "Seconds until the lease that is held expires", ("model",), left)
    held = [((name,), lease is not None) for name, lease in leases]
    yield _gauge("lease_held", "1 if a trainer leases the next batch", ("model",), held)
    for key, text, value in _LEDGER:
        yield _gauge(key, text, ("model",), [((model.name,), value(model.ledger)) for model in models])


_LEDGER: tuple[tuple[str, str, Callable[[StoredLedger], float]], ...] = (
    ("ledger_free_slots", "Groups that may start within the staleness bound", lambda s: s.rule.free_slots()),
    ("ledger_next_batch", "The next batch to train, counted from 0", lambda s: s.rule.next_buffer),
    (
        "ledger_broken",
        "1 if the ledger has stopped, and the gateway must be restarted",
        lambda s: s.broken is not None,
    ),
)


_LENGTHS = (
    (
        "tail_recall",
        "The share of this process's longest recent calls that were predicted to be among the longest",
    ),
    ("tail_share", "The share of recent calls that were predicted to be among the longest"),
    ("mean_error", "The mean absolute error of recent length predictions, in tokens"),
)


def _one(name: str, text: str, value: float) -> Metric:
    return _gauge(name, text, (), [((), value)])


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    family = GaugeMetricFamily(f"headgate_{name}", text, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family
