"""Events about nodes from outside, and the decisions to lend them. Frozen values with a JSON form.

A node is a machine, or a part of one, with tags. Tagged `rollout`, its engines sample; tagged `train`, a trainer works on it;
with both tags, its engines sample while the trainer does not need it (SeamlessFlow, arXiv 2508.11553).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from scheduler.policies.staleness_base import StalenessRule

Role = Literal["rollout", "train", "switching", "idle"]
"""The role of a node: its engines are awake; its trainer has it; it changes from one to the other; neither."""


@dataclass(frozen=True, slots=True)
class NodeAdded:
    """A node was added, or its tags changed."""

    node: str
    tags: tuple[str, ...]
    zone: str = ""


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    """A node has left."""

    node: str


@dataclass(frozen=True, slots=True)
class Hosted:
    """An engine runs on a node. Engines without a node are never lent."""

    engine: str
    node: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """A trainer claims its node, to compute on it."""

    node: str
    model: str


@dataclass(frozen=True, slots=True)
class Released:
    """A trainer waits for a batch and does not need its node."""

    node: str
    model: str
    busy_s: float = 0.0
    """Seconds that it computed on the groups of its newest trained batch, without the step at the end and without waiting; 0
    if it has trained none, or does not report it.
    """
    load_s: float = 0.0
    """Seconds that its weights took to come back to the node when it was claimed last; 0 if they never left it."""


@dataclass(frozen=True, slots=True)
class Filling:
    """The batch that a model's trainer waits for. Sent once a second if nodes may be lent, and when a batch is leased, whole or
    trained."""

    model: str
    batch: int
    groups: int
    """Rewarded groups, of `size`."""
    size: int
    running: int
    """Calls that run or wait."""
    ahead: int = 0
    """Groups of the next batch that are rewarded; 0 also if the rule keeps none."""
    leased: int = -1
    """The newest batch that a trainer has leased; -1: none. `scheduler plan --run` reads it from the recording."""
    trained: int = -1
    """The newest batch that was trained, likewise."""

    @classmethod
    def of(cls, model: str, rule: StalenessRule, running: int, leased: int = -1, trained: int = -1) -> Self:
        """Read it from a trained model's ledger. A truncated batch gets no more groups than it has."""
        batch = rule.next_batch
        occupied = {row.batch: row.occupied for row in rule.batches()}
        groups = occupied.get(batch, 0)
        size = groups if rule.complete(batch) else rule.settings.batch
        return cls(model, batch, groups, size, running, occupied.get(batch + 1, 0), leased, trained)


@dataclass(frozen=True, slots=True)
class Asleep:
    """An engine sleeps: it holds no call, and its memory is free."""

    engine: str
    warm: bool = True
    """True if it has a process, which only has to be woken; otherwise it has to be launched."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The new role of a node, and the reason."""

    node: str
    role: Role
    reason: str = ""
    claimable: bool = False
    """Its trainer may claim it although its batch is not whole: the node was recalled, or will not be lent before the batch is
    whole."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command that an engine be awake, or asleep."""

    engine: str
    awake: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClaimTimeout:
    """The deadline of a claim: its trainer may be dead, unless it sent a request after `serial`."""

    node: str
    serial: int


@dataclass(frozen=True, slots=True)
class SwitchTimeout:
    """A switch's deadline. `serial` identifies the switch."""

    node: str
    serial: int
