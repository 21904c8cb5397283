"""The state of nodes in the gateway: their tags, who uses them, and how long they spent in each role.

Reports nodes and the fill of batches to the control program: once a second, and when a batch is complete or a trainer
waits for the next one. The program decides which node is lent (`scheduler.program.lending`). Owns the trainers' claims, and the
seconds by role since this process became the coordinator. Nodes (and engines) that were added by the admin API are known until
this process ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, get_args

from gateway.config import NodeSettings
from gateway.config.settings import Settings
from gateway.control.host import ControlHost
from gateway.generation.peers import Peers
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from gateway.training_feed.ledger import LedgerListener, StoredLedger
from headgate.errors import Conflict, NotFound
from scheduler.program.nodes import Claimed, Filling, NodeAdded, NodeRemoved, Released, Role, RoleChange

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(slots=True)
class ManagedNode:
    """A node, its role and its holder."""

    name: str
    settings: NodeSettings
    role: Role = "idle"
    reason: str = ""
    claimable: bool = False
    """Its trainer may claim it before its batch is whole."""
    holder: str = ""
    """The model whose trainer has claimed it."""
    since: float = field(default_factory=lambda: time.monotonic())
    seconds: dict[Role, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 0.0))

    def is_now(self, decided: RoleChange) -> None:
        """Apply a decision of the control program."""
        now = time.monotonic()
        self.seconds[self.role] += now - self.since
        self.role, self.reason, self.claimable, self.since = (
            decided.role,
            decided.reason,
            decided.claimable,
            now,
        )
        if decided.role in ("idle", "rollout"):
            self.holder = ""

    def spent(self) -> dict[Role, float]:
        """Return the seconds by role, so far."""
        return {
            role: s + (time.monotonic() - self.since if role == self.role else 0.0)
            for role, s in self.seconds.items()
        }

    @property
    def lendable(self) -> bool:
        """True if the node has both tags."""
        return {"rollout", "train"} <= set(self.settings.tags)


class NodeDescription(TypedDict):
    """A node, as the admin API returns it."""

    name: str
    tags: list[str]
    zone: str
    role: str
    reason: str
    claimable: bool
    claimed_by: str | None
    engines: list[str]
    seconds: Mapping[str, float]
    """The seconds that it has spent in each role."""


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A batch, and the seconds for which its trainer reports that it was busy with it."""

    batch: int
    busy_s: float
    """Computing on groups."""
    load_s: float
    """Bringing its weights back to the node."""
    rest_s: float
    """Everything else but waiting."""


class Nodes(LedgerListener):
    """All nodes. Make it before the host starts, and call `begin` after that."""

    def __init__(
        self,
        settings: Settings,
        host: ControlHost,
        ledgers: Mapping[str, StoredLedger],
        peers: Peers,
    ) -> None:
        self.nodes: dict[str, ManagedNode] = {}
        self.claim_s = settings.lending.claim_s
        self._settings = settings
        self._host = host
        self.batches: dict[str, TrainedBatch] = {}
        """For each model, what its trainer has reported of the batch that it trained last; nothing after a restart."""
        self._ledgers = ledgers
        self._peers = peers
        self._changed = asyncio.Event()
        host.observe(host.program.lending.roles, self._on_roles)

    def begin(self) -> None:
        """Add the nodes of the configuration, and report the batches."""
        for model, ledger in self._ledgers.items():
            ledger.subscribe(self)
            self.batch_changed(model)
        for name, settings in self._settings.nodes.items():
            self.add(name, settings)

    def slots(self, model: str) -> list[Slot]:
        """Return the engines of a model that the configuration puts on nodes."""
        return [
            Slot(f"{name}-{i}", url, name, settings.mirrors[i] if settings.mirrors else "", settings.zone)
            for name, settings in self._settings.nodes.items()
            if self._settings.model_on(name) == model
            for i, url in enumerate(settings.places)
        ]

    # Nodes

    def add(self, name: str, settings: NodeSettings) -> ManagedNode:
        """Add a node, or change the tags and description of a known one, whose engines stay."""
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = ManagedNode(name, settings)
        node.settings = settings
        self._send(self._host.program.lending.added, NodeAdded(name, settings.tags, settings.zone))
        return node

    def remove(self, name: str) -> ManagedNode:
        """Remove a node: drains and stop its engines. Raise NotFound."""
        node = self.get(name)
        for model, slot in self.engines(name):
            self._host.remove(model, slot.name)
        del self.nodes[name]
        self._send(self._host.program.lending.removed, NodeRemoved(name))
        self._notify()
        return node

    def get(self, name: str) -> ManagedNode:
        """Return a node. Raise NotFound."""
        if (node := self.nodes.get(name)) is None:
            raise NotFound(f"no node {name!r}", code="no_node")
        return node

    def engines(self, name: str) -> list[tuple[str, Slot]]:
        """Return the engines on a node, each with its model."""
        pools = {model: engines.pool for model, engines in self._host.models.items()}
        return [
            (model, slot)
            for model, pool in pools.items()
            for slot in pool.slots.values()
            if slot.node == name
        ]

    # Trainers

    async def claim(self, name: str, model: str, wait_s: float) -> ManagedNode:
        """Claim a node for a trainer, or renew its claim; wait up to `wait_s` until the trainer has the node.

        Raise NotFound, also for a node that is being removed, and Conflict if it is not for trainers or another trainer has it.
        """
        node = self._trainers(name, model)
        node.holder = model
        self._send(self._host.program.lending.claimed, Claimed(name, model))
        await self._until(lambda: node.role == "train" or self.nodes.get(name) is not node, wait_s)
        self.get(name)
        return node

    def release(
        self, name: str, model: str, busy_s: float = 0.0, load_s: float = 0.0, rest_s: float = 0.0
    ) -> ManagedNode:
        """Offer a trainer's node for lending. The trainer computed for `busy_s` on the groups of its last batch, for which its
        weights had taken `load_s` to come back to the node, and was busy for `rest_s` with the rest of it.

        Raise NotFound and Conflict, as `claim`.
        """
        node = self._trainers(name, model)
        node.holder = ""
        if busy_s and (ledger := self._ledgers.get(model)) is not None:
            self.batches[model] = TrainedBatch(ledger.trained, busy_s, load_s, rest_s)
        self._send(self._host.program.lending.released, Released(name, model, busy_s, load_s))
        return node

    def _trainers(self, name: str, model: str) -> ManagedNode:
        node = self.get(name)
        if "train" not in node.settings.tags:
            message = f"the node {name!r} lacks the tag 'train' (its tags: {', '.join(node.settings.tags)})"
            raise Conflict(message, code="node_not_for_training")
        if node.holder not in ("", model):
            message = f"the node {name!r} is claimed by the trainer of {node.holder!r}"
            raise Conflict(message, code="node_claimed")
        return node

    # Commands and events

    async def tend(self) -> None:
        """Once a second, where it matters: how full the batches are that trainers wait for."""
        if any(node.lendable for node in self.nodes.values()):
            for model in self._host.models:
                self._host.inject(self._host.program.lending.filling, self._filling(model))

    def batch_changed(self, model: str) -> None:
        """Report how full the batch is immediately, and not with the next second."""
        if self._host.running:  # the ledger goes on when the program has ended
            self._send(self._host.program.lending.filling, self._filling(model))

    def _filling(self, model: str) -> Filling:
        pool = self._host.models[model].pool
        running = self._calls(model, pool)
        if (ledger := self._ledgers.get(model)) is None:
            return Filling(model, 0, 0, 0, running)
        return Filling.of(model, ledger.rule, running, ledger.leased, ledger.trained)

    def _calls(self, model: str, pool: EnginePool) -> int:
        elsewhere = sum(self._peers.count_runs(model, slot)[0] for slot in pool.slots)
        return len(pool.calls) + elsewhere + self._peers.count_waiting(model)

    def _send(self, action: Any, value: Any) -> None:
        self._host.inject(action, value, now=True)

    def _on_roles(self, decided: tuple[RoleChange, ...]) -> None:
        for role in decided:
            if (node := self.nodes.get(role.node)) is not None:
                node.is_now(role)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            return

    def describe(self, node: ManagedNode) -> NodeDescription:
        """Describe a node for the admin API."""
        settings = node.settings
        return {
            "name": node.name,
            "tags": list(settings.tags),
            "zone": settings.zone,
            "role": node.role,
            "reason": node.reason,
            "claimable": node.claimable,
            "claimed_by": node.holder or None,
            "engines": [slot.name for _, slot in self.engines(node.name)],
            "seconds": {role: round(s, 3) for role, s in node.spent().items()},
        }
