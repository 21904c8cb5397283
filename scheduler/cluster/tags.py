"""Assigns processes to nodes. Pure: tags and capacities in, placements out.

A *node* is a machine, or a part of one. Its tags decide its use: engines run on nodes with the engine's tags (`rollout`), ranks
on nodes with the trainer's (`train`). So colocated, disaggregated and mixed clusters differ only in tags (SeamlessFlow, arXiv
2508.11553). On a node with both roles engines and ranks take turns, so each may need the whole node. The same nodes always give
the same placements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.cluster.errors import Unsatisfied

NODE_LABEL = "node"
"""The label that names a node of one machine."""
TRAIN = "train"
"""The gateway's tag for a node that a trainer claims."""
HAS = "true"
"""The value of a label that is a tag."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The resources of a node, or of one process. Memory is in GiB."""

    cpus: float = 0.0
    gpus: int = 0
    memory_gb: float = 0.0

    def holds(self, need: Capacity) -> int | None:
        """Return how many processes with this need fit; None if nothing is needed, so that any number does."""
        pairs = ((self.cpus, need.cpus), (self.gpus, need.gpus), (self.memory_gb, need.memory_gb))
        counts = [int(has / wants) for has, wants in pairs if wants > 0]
        return min(counts) if counts else None

    def lacks(self, need: Capacity, times: int = 1) -> str:
        """Return the resources that are too small for `times` processes, in words; empty if none is."""
        pairs = (
            ("cpus", self.cpus, need.cpus),
            ("gpus", self.gpus, need.gpus),
            ("memory_gb", self.memory_gb, need.memory_gb),
        )
        return ", ".join(
            f"{wants * times:g} {name} (it has {has:g})" for name, has, wants in pairs if has < wants * times
        )


@dataclass(frozen=True, slots=True)
class DiscoveredNode:
    """A node that the launcher found, under its own `id`."""

    id: str
    labels: Mapping[str, str]
    capacity: Capacity
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one kind that the cluster file requests."""

    name: str
    tags: tuple[str, ...]
    zone: str = ""
    hardware: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    engines: int = 0
    """Engines on each node."""
    count: int = 1
    """The number of nodes that is needed; further ones are spare."""
    most: int = 1
    gpu_memory_gb: float | None = None
    """The memory of each GPU of a node; None: unknown."""
    engine_gpus: int | None = None
    """GPUs of each engine; None: those of `Need`."""

    @property
    def selector(self) -> dict[str, str]:
        """The labels of the group's nodes. A tag is a label with the value `true`; a named node needs only its name."""
        if NODE_LABEL in self.labels:
            return dict(self.labels)
        named = {"zone": self.zone, "hardware": self.hardware}
        return {
            **dict.fromkeys(self.tags, HAS),
            **{key: value for key, value in named.items() if value},
            **self.labels,
        }

    def matches(self, found: DiscoveredNode) -> bool:
        """Return True if the node has all labels of the group."""
        return all(found.labels.get(key) == value for key, value in self.selector.items())


@dataclass(frozen=True, slots=True)
class NodeInUse:
    """A node in use, and its group."""

    name: str
    group: NodeGroup
    discovered: DiscoveredNode

    @property
    def tags(self) -> frozenset[str]:
        """The tags of its group."""
        return frozenset(self.group.tags)


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that one process of a kind needs of its node."""

    what: str
    tags: frozenset[str]
    capacity: Capacity = Capacity()

    def on(self, group: NodeGroup) -> Need:
        """Return the need of an engine on a node of this group."""
        if group.engine_gpus is None:
            return self
        return replace(self, capacity=replace(self.capacity, gpus=group.engine_gpus))


@dataclass(frozen=True, slots=True)
class Placement:
    """The node and resources of one process."""

    name: str
    node: NodeInUse
    number: int
    """The number among the processes of its kind on the node, from 0."""
    devices: tuple[int, ...] = ()
    """The GPUs of the node that it uses, counted from 0."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The placements of all processes."""

    engines: tuple[Placement, ...]
    ranks: tuple[Placement, ...]

    def roles(self, node: NodeInUse) -> str:
        """Return the roles of a node, in words."""
        engines = sum(place.node == node for place in self.engines)
        ranks = [str(rank) for rank, place in enumerate(self.ranks) if place.node == node]
        roles = [f"{engines} engine{'s' * (engines > 1)}"] if engines else []
        roles += [f"trainer rank {', '.join(ranks)}"] if ranks else []
        return " + ".join(roles) or "nothing"


def match(
    groups: Sequence[NodeGroup],
    found: Sequence[DiscoveredNode],
    names: Mapping[str, str],
    spare: int | None = None,
) -> list[NodeInUse]:
    """Return the nodes of the groups. Groups with more labels choose first, and a node stays in its group.

    `names`: the names of nodes that are in use, by id. `spare`: the number of nodes in use beyond the groups' counts; None: all.
    """
    order = sorted(groups, key=lambda group: -len(group.selector))
    before = {group.name: [s for s in found if names.get(s.id) == _name(group, s)] for group in order}
    free = [s for s in found if s.id not in names]
    chosen: dict[str, list[DiscoveredNode]] = {}
    for group in order:
        mine = [s for s in before[group.name] if group.matches(s)]
        mine += [s for s in free if group.matches(s)][: max(group.count - len(mine), 0)]
        chosen[group.name] = mine
        free = [s for s in free if s not in mine]
    left = None if spare is None else spare - sum(max(len(chosen[g.name]) - g.count, 0) for g in order)
    for group in order:
        room = group.most - len(chosen[group.name])
        more = [s for s in free if group.matches(s)][: max(room if left is None else min(room, left), 0)]
        chosen[group.name] += more
        free = [s for s in free if s not in more]
        left = None if left is None else left - len(more)
    return [
        NodeInUse(_name(group, s), group, s) for group in groups for s in chosen[group.name][: group.most]
    ]


def next_spare(
    groups: Sequence[NodeGroup], found: Sequence[DiscoveredNode], names: Mapping[str, str], spare: int
) -> tuple[int, int]:
    """Return the least number of further spare nodes with engines, and the number of their engines; (0, 0) without such nodes."""
    for more in range(1, len(found) + 1):
        nodes = match(groups, found, names, spare + more)
        if engines := sum(node.group.engines for node in nodes if node.discovered.id not in names):
            return more, engines
    return 0, 0


def beyond(nodes: Sequence[NodeInUse]) -> int:
    """Return the number of nodes beyond those that their groups need."""
    groups = {node.group.name: node.group for node in nodes}
    have = Counter(node.group.name for node in nodes)
    return sum(max(have[name] - group.count, 0) for name, group in groups.items())


def last_spare(
    nodes: Sequence[NodeInUse], joined: Sequence[str], trainer: frozenset[str]
) -> NodeInUse | None:
    """Return the node with engines that joined last, of groups with more nodes than they need.

    `joined`: ids, in order. `trainer`: the tags of the trainer's nodes, which are never given back.
    """
    have = Counter(node.group.name for node in nodes)
    more = {n.discovered.id: n for n in nodes if have[n.group.name] > n.group.count and n.group.engines}
    free = (more[id_] for id_ in reversed(joined) if id_ in more)
    return next((node for node in free if not trainer <= node.tags), None)


def check_counts(
    groups: Sequence[NodeGroup], found: Sequence[DiscoveredNode], nodes: Sequence[NodeInUse]
) -> None:
    """Raise Unsatisfied if a group has fewer nodes than it needs."""
    for group in groups:
        have = sum(node.group == group for node in nodes)
        if have >= group.count:
            continue
        wanted = ", ".join(f"{key}={value}" for key, value in group.selector.items())
        missing = [
            f"{key}={value}"
            for key, value in group.selector.items()
            if not any(s.labels.get(key) == value for s in found)
        ]
        why = (
            f"no node has the label {' or '.join(missing)}"
            if missing
            else "the other nodes are in use or lack a label"
        )
        raise Unsatisfied(
            f"the group {group.name!r} needs {group.count} nodes with the labels {wanted or '(any)'}, and has {have}:"
            f" {why}. All nodes: {_described(found)}"
        )


def assign(nodes: Sequence[NodeInUse], engine: Need, trainer: Need | None, ranks: int = 1) -> Assignment:
    """Place every engine and every rank of the trainer. Raise Unsatisfied."""
    engines = tuple(place for node in nodes for place in _engines(node, engine.on(node.group)))
    if not engines:
        raise Unsatisfied(f"no node can run an engine: {_why_none(nodes, engine)}")
    return Assignment(engines, _ranks(nodes, engine, trainer, ranks) if trainer is not None else ())


def _engines(node: NodeInUse, need: Need) -> list[Placement]:
    count = node.group.engines
    if not count:
        return []
    if lacking := need.tags - node.tags:
        raise Unsatisfied(
            f"node {node.name}: engines = {count}, but it lacks the tag {', '.join(sorted(lacking))}"
        )
    if short := node.discovered.capacity.lacks(need.capacity, count):
        raise Unsatisfied(f"node {node.name}: {count} of {need.what} need {short}")
    return [Placement(f"{node.name}-{i}", node, i, _devices(need, i)) for i in range(count)]


def _ranks(nodes: Sequence[NodeInUse], engine: Need, need: Need, ranks: int) -> tuple[Placement, ...]:
    """Place ranks on nodes without engines first; fill each node before the next."""
    able = [node for node in nodes if need.tags <= node.tags]
    if not able:
        raise Unsatisfied(f"no node can run the trainer: {_why_none(nodes, need)}")
    able.sort(key=lambda node: engine.tags <= node.tags)
    even = -(-ranks // len(able))
    placed: list[Placement] = []
    for node in able:
        holds = node.discovered.capacity.holds(need.capacity)
        room = even if holds is None else holds
        for local in range(min(room, ranks - len(placed))):
            placed.append(Placement(f"trainer-{len(placed)}", node, local, _devices(need, local)))
    if len(placed) < ranks:
        described = "; ".join(f"{node.name}: {_room(node, need)}" for node in able)
        raise Unsatisfied(
            f"the trainer has {ranks} ranks, and the nodes tagged {', '.join(sorted(need.tags))} have room for {len(placed)}"
            f" ({described})"
        )
    return tuple(placed)


def _room(node: NodeInUse, need: Need) -> str:
    capacity = node.discovered.capacity
    return capacity.lacks(need.capacity) or f"room for {capacity.holds(need.capacity)}"


def rank_counts(
    nodes: Sequence[NodeInUse], engine: Need, need: Need, least: int, most: int, unit: int = 1
) -> list[int]:
    """Return the numbers of ranks from `least` to `most` that use whole nodes, and `least` itself.

    A rank that needs nothing has a node of its own. `unit`: every number above `least` is a multiple of it.
    """
    able = [node for node in nodes if need.tags <= node.tags]
    able.sort(key=lambda node: engine.tags <= node.tags)
    counts, total = [least], 0
    for node in able:
        holds = node.discovered.capacity.holds(need.capacity)
        total += 1 if holds is None else holds
        if counts[-1] < total <= most and total % unit == 0:
            counts.append(total)
    return counts


def _devices(need: Need, number: int) -> tuple[int, ...]:
    each = need.capacity.gpus
    return tuple(range(number * each, (number + 1) * each))


def _why_none(nodes: Sequence[NodeInUse], need: Need) -> str:
    lacking = [tag for tag in sorted(need.tags) if not any(tag in node.tags for node in nodes)]
    tags = "; ".join(f"{node.name}: {', '.join(sorted(node.tags)) or 'no tags'}" for node in nodes)
    if not nodes:
        return f"no node exists for the tag {', '.join(sorted(need.tags))}"
    if lacking:
        return f"no node has the tag {', '.join(lacking)} ({tags})"
    return f"no node has all of the tags {', '.join(sorted(need.tags))}, and engines ({tags})"


def _name(group: NodeGroup, found: DiscoveredNode) -> str:
    return group.name if group.most == 1 else f"{group.name}-{found.id[:8]}"


def _described(found: Sequence[DiscoveredNode]) -> str:
    rows = [
        f"{s.id[:8]} ({', '.join(f'{k}={v}' for k, v in sorted(s.labels.items()) if '/' not in k) or 'no labels'})"
        for s in found
    ]
    return "; ".join(rows) or "none"
