"""The state that lending decides on: nodes, their engines, and the batches that their trainers wait for.

Invariants: an engine is in the `Node.engines` of the node that it names, and of no other; `Engine.node` is empty if it lives on
no node, or was reported before its node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from scheduler.policies.lending import Mean, Pace
from scheduler.program.nodes import Filling, Role

Switch = Literal["lend", "recall"]


@dataclass(slots=True)
class NodeEngine:
    """An engine and its state."""

    node: str = ""
    model: str = ""
    """Empty: it has not been reported yet."""
    open: bool = False
    asleep: bool = False
    warm: bool = False
    leaving: bool = False
    """True if the engine was removed and may not have ended yet."""


@dataclass(slots=True)
class ProgramNode:
    """A node, its claim, and the measured seconds of its switches."""

    name: str
    tags: frozenset[str]
    engines: dict[str, None] = field(default_factory=dict)
    """Its engines in the order in which they were added."""
    role: Role = "idle"
    model: str = ""
    """The model whose trainer sent the last request."""
    claimed: bool = False
    unknown_claim: bool = False
    """True if its trainer has sent nothing yet, so that the node may be claimed."""
    lent: bool = False
    """True if its engines are wanted awake."""
    claimable: bool = False
    """True if its trainer may have it immediately."""
    switch: Switch | None = None
    """The running switch."""
    cold: bool = False
    """True if a process has to be started in this switch."""
    pending: set[str] = field(default_factory=set)
    """The engines for which the switch still waits."""
    began: int = 0
    lent_at: int = 0
    recalled_at: int | None = None
    serial: int = 0
    """The number of the node's last switch."""
    claim: int = 0
    """Serial of the trainer's last request."""
    wake: Mean = field(default_factory=Mean)
    launch: Mean = field(default_factory=Mean)
    sleep: Mean = field(default_factory=Mean)
    load: Mean = field(default_factory=Mean)
    """Loading the trainer's weights to the device."""

    @property
    def unused(self) -> bool:
        """True if the trainer has no use for the node, so that it may be lent."""
        return "train" in self.tags and not (self.claimed or self.unknown_claim)

    @property
    def lendable(self) -> bool:
        """True if the node's engines may sample."""
        return {"rollout", "train"} <= self.tags


class AwakeEngines:
    """Open engines, counted: `of` a model; `on` a node, of a model; `lent`, by a trainer's model, of a model."""

    def __init__(self, engines: dict[str, NodeEngine], nodes: dict[str, ProgramNode]) -> None:
        self.of: Counter[str] = Counter()
        self.on: Counter[tuple[str, str]] = Counter()
        self.lent: Counter[tuple[str, str]] = Counter()
        for engine in engines.values():
            if not engine.open:
                continue
            self.of[engine.model] += 1
            self.on[engine.node, engine.model] += 1
            node = nodes.get(engine.node)
            if node is not None and node.lendable:
                self.lent[node.model, engine.model] += 1


class Batches:
    """The batch of each model's trainer: how full it is, how fast it fills, and how long the trainer computes on one."""

    def __init__(self, smooth_s: float) -> None:
        self._smooth_s = smooth_s
        self._filling: dict[str, Filling] = {}
        self._paces: dict[str, Pace] = {}
        self._training: dict[str, Mean] = {}

    def filled(self, now_s: float, filling: Filling) -> None:
        """Record how full a model's batch is."""
        self._filling[filling.model] = filling
        pace = self._paces.setdefault(filling.model, Pace(self._smooth_s))
        pace.update(now_s, filling.batch, filling.groups, filling.size, filling.ahead)

    def trained(self, model: str, busy_s: float) -> None:
        """Record the time that a trainer computed on a batch's groups."""
        self._training.setdefault(model, Mean()).measured(busy_s)

    def wait_s(self, model: str) -> float:
        """Predicted, until the batch is whole; infinite if unknown."""
        pace = self._paces.get(model)
        return pace.wait_s if pace is not None else float("inf")

    def train_s(self, model: str) -> float:
        """Return the seconds that computing on the groups of one batch takes; 0 while unknown."""
        mean = self._training.get(model)
        return mean.value if mean is not None else 0.0

    def calls(self, models: Iterable[str]) -> int:
        """Return the number of running and waiting calls of these models."""
        return sum(self._filling[model].running for model in models if model in self._filling)
