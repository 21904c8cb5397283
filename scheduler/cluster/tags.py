"""Assigns processes to nodes. Pure: tags and capacities in, places out.

A *node* is a machine, or a part of one. What it is for follows from its tags: engines are placed where the engine's tags are
(`rollout`), the trainer's ranks where the trainer's are (`train`), both where both are. So colocated, disaggregated and mixed
clusters differ in nothing but tags (SeamlessFlow, arXiv 2508.11553). On a node that has both roles, engines and ranks take turns,
so each needs no more than the whole node for itself. The same nodes always give the same places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.cluster.errors import Unsatisfied

NODE_LABEL = "node"
"""The label by which a named node of one machine is found."""
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
        """Returns how many such needs fit in at once; None if nothing is needed, so that any number does."""
        pairs = ((self.cpus, need.cpus), (self.gpus, need.gpus), (self.memory_gb, need.memory_gb))
        rooms = [int(has / wants) for has, wants in pairs if wants > 0]
        return min(rooms) if rooms else None

    def lacks(self, need: Capacity, times: int = 1) -> str:
        """Names the resources that are too small for `times` processes; empty if none is."""
        pairs = (
            ("cpus", self.cpus, need.cpus),
            ("gpus", self.gpus, need.gpus),
            ("memory_gb", self.memory_gb, need.memory_gb),
        )
        return ", ".join(
            f"{wants * times:g} {name} (it has {has:g})" for name, has, wants in pairs if has < wants * times
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """A node that is there: `id` is the launcher's name for it."""

    id: str
    labels: Mapping[str, str]
    capacity: Capacity
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that are alike, as the cluster file asks for them."""

    name: str
    tags: tuple[str, ...]
    zone: str = ""
    hardware: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    engines: int = 0
    """On each."""
    count: int = 1
    """The number that is needed; further ones are spare."""
    most: int = 1
    gpu_memory_gb: float | None = None
    """The memory of each of a node's GPUs; None: nobody has said."""
    engine_gpus: int | None = None
    """GPUs of each engine; None: as many as `Need` says."""

    @property
    def selector(self) -> dict[str, str]:
        """The labels that a node of this group has: a tag is a label whose value is `true`. A named one needs no more."""
        if NODE_LABEL in self.labels:
            return dict(self.labels)
        named = {"zone": self.zone, "hardware": self.hardware}
        return {
            **dict.fromkeys(self.tags, HAS),
            **{key: value for key, value in named.items() if value},
            **self.labels,
        }

    def wants(self, seen: Seen) -> bool:
        """True if a node has all of these labels."""
        return all(seen.labels.get(key) == value for key, value in self.selector.items())


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is there, and what it is for."""

    name: str
    group: Group
    seen: Seen

    @property
    def tags(self) -> frozenset[str]:
        """Its group's: what it is used for, whatever other labels it has."""
        return frozenset(self.group.tags)


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that one process of a kind needs of its node."""

    what: str
    tags: frozenset[str]
    capacity: Capacity = Capacity()

    def on(self, group: Group) -> Need:
        """The need of an engine on a node of this group."""
        if group.engine_gpus is None:
            return self
        return replace(self, capacity=replace(self.capacity, gpus=group.engine_gpus))


@dataclass(frozen=True, slots=True)
class Place:
    """The node and resources of one process."""

    name: str
    node: Node
    number: int
    """Among its like on the node, from 0."""
    devices: tuple[int, ...] = ()
    """The node's GPUs that are its own, counted from 0."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The nodes of every process."""

    engines: tuple[Place, ...]
    ranks: tuple[Place, ...]

    def roles(self, node: Node) -> str:
        """The roles of a node, in words."""
        engines = sum(place.node == node for place in self.engines)
        ranks = [str(rank) for rank, place in enumerate(self.ranks) if place.node == node]
        told = [f"{engines} engine{'s' * (engines > 1)}"] if engines else []
        told += [f"trainer rank {', '.join(ranks)}"] if ranks else []
        return " + ".join(told) or "nothing"


def match(
    groups: Sequence[Group], seen: Sequence[Seen], kept: Mapping[str, str], spare: int | None = None
) -> list[Node]:
    """The nodes that the groups have. Groups that ask for more labels choose first, and a node stays in its group.

    `kept`: for each id the name of the node as it was before. `spare`: how many nodes beyond the groups' counts are used;
    None: all of them.
    """
    order = sorted(groups, key=lambda group: -len(group.selector))
    before = {group.name: [s for s in seen if kept.get(s.id) == _name(group, s)] for group in order}
    free = [s for s in seen if s.id not in kept]
    chosen: dict[str, list[Seen]] = {}
    for group in order:
        mine = [s for s in before[group.name] if group.wants(s)]
        mine += [s for s in free if group.wants(s)][: max(group.count - len(mine), 0)]
        chosen[group.name] = mine
        free = [s for s in free if s not in mine]
    left = None if spare is None else spare - sum(max(len(chosen[g.name]) - g.count, 0) for g in order)
    for group in order:
        room = group.most - len(chosen[group.name])
        more = [s for s in free if group.wants(s)][: max(room if left is None else min(room, left), 0)]
        chosen[group.name] += more
        free = [s for s in free if s not in more]
        left = None if left is None else left - len(more)
    return [Node(_name(group, s), group, s) for group in groups for s in chosen[group.name][: group.most]]


def next_spare(
    groups: Sequence[Group], seen: Sequence[Seen], kept: Mapping[str, str], spare: int
) -> tuple[int, int]:
    """How many nodes beyond `spare` must be used for there to be more engines, and how many more there are then; 0 and 0 if no
    number of nodes brings any."""
    for more in range(1, len(seen) + 1):
        nodes = match(groups, seen, kept, spare + more)
        if engines := sum(node.group.engines for node in nodes if node.seen.id not in kept):
            return more, engines
    return 0, 0


def beyond(nodes: Sequence[Node]) -> int:
    """The number of nodes that are more than their groups need."""
    groups = {node.group.name: node.group for node in nodes}
    have = Counter(node.group.name for node in nodes)
    return sum(max(have[name] - group.count, 0) for name, group in groups.items())


def last_spare(nodes: Sequence[Node], joined: Sequence[str], trainer: frozenset[str]) -> Node | None:
    """The node with engines that joined last, of those of which their groups have more than they need.

    `joined`: ids, in order. `trainer`: the tags of the trainer's nodes, which are never given back.
    """
    have = Counter(node.group.name for node in nodes)
    more = {n.seen.id: n for n in nodes if have[n.group.name] > n.group.count and n.group.engines}
    free = (more[id_] for id_ in reversed(joined) if id_ in more)
    return next((node for node in free if not trainer <= node.tags), None)


def check_counts(groups: Sequence[Group], seen: Sequence[Seen], nodes: Sequence[Node]) -> None:
    """Raises Unsatisfied if a group has fewer nodes than it needs."""
    for group in groups:
        have = sum(node.group == group for node in nodes)
        if have >= group.count:
            continue
        wanted = ", ".join(f"{key}={value}" for key, value in group.selector.items())
        nobody = [
            f"{key}={value}"
            for key, value in group.selector.items()
            if not any(s.labels.get(key) == value for s in seen)
        ]
        why = (
            f"no node has the label {' or '.join(nobody)}"
            if nobody
            else "the others are taken or lack a label"
        )
        raise Unsatisfied(
            f"the group {group.name!r} needs {group.count} nodes with the labels {wanted or '(any)'}, and there are {have}:"
            f" {why}. There is: {_told(seen)}"
        )


def assign(nodes: Sequence[Node], engine: Need, trainer: Need | None, ranks: int = 1) -> Assignment:
    """Places for every engine and every rank of the trainer. Raises Unsatisfied."""
    engines = tuple(place for node in nodes for place in _engines(node, engine.on(node.group)))
    if not engines:
        raise Unsatisfied(f"there is no place for an engine: {_nobody(nodes, engine)}")
    return Assignment(engines, _ranks(nodes, engine, trainer, ranks) if trainer is not None else ())


def _engines(node: Node, need: Need) -> list[Place]:
    count = node.group.engines
    if not count:
        return []
    if lacking := need.tags - node.tags:
        raise Unsatisfied(
            f"node {node.name}: engines = {count}, but it lacks the tag {', '.join(sorted(lacking))}"
        )
    if short := node.seen.capacity.lacks(need.capacity, count):
        raise Unsatisfied(f"node {node.name}: {count} of {need.what} need {short}")
    return [Place(f"{node.name}-{i}", node, i, _devices(need, i)) for i in range(count)]


def _ranks(nodes: Sequence[Node], engine: Need, need: Need, ranks: int) -> tuple[Place, ...]:
    """Nodes that do nothing else come first; each is filled before the next."""
    able = [node for node in nodes if need.tags <= node.tags]
    if not able:
        raise Unsatisfied(f"there is no place for the trainer: {_nobody(nodes, need)}")
    able.sort(key=lambda node: engine.tags <= node.tags)
    even = -(-ranks // len(able))
    places: list[Place] = []
    for node in able:
        holds = node.seen.capacity.holds(need.capacity)
        room = even if holds is None else holds
        for local in range(min(room, ranks - len(places))):
            places.append(Place(f"trainer-{len(places)}", node, local, _devices(need, local)))
    if len(places) < ranks:
        nodes_told = "; ".join(
            f"{node.name}: {node.seen.capacity.lacks(need.capacity, 1) or f'room for {node.seen.capacity.holds(need.capacity)}'}"
            for node in able
        )
        raise Unsatisfied(
            f"the trainer has {ranks} ranks, and there is room for {len(places)} on the nodes tagged"
            f" {', '.join(sorted(need.tags))} ({nodes_told})"
        )
    return tuple(places)


def rank_counts(
    nodes: Sequence[Node], engine: Need, need: Need, least: int, most: int, unit: int = 1
) -> list[int]:
    """The numbers of ranks from `least` to `most` with which nodes are the trainer's as a whole, `least` itself among them.

    A rank that needs nothing has a node of its own. `unit`: every number above `least` is a multiple of it.
    """
    able = [node for node in nodes if need.tags <= node.tags]
    able.sort(key=lambda node: engine.tags <= node.tags)
    counts, total = [least], 0
    for node in able:
        holds = node.seen.capacity.holds(need.capacity)
        total += 1 if holds is None else holds
        if counts[-1] < total <= most and total % unit == 0:
            counts.append(total)
    return counts


def _devices(need: Need, number: int) -> tuple[int, ...]:
    each = need.capacity.gpus
    return tuple(range(number * each, (number + 1) * each))


def _nobody(nodes: Sequence[Node], need: Need) -> str:
    lacking = [tag for tag in sorted(need.tags) if not any(tag in node.tags for node in nodes)]
    tags = "; ".join(f"{node.name}: {', '.join(sorted(node.tags)) or 'no tags'}" for node in nodes)
    if not nodes:
        return f"no node is there for the tag {', '.join(sorted(need.tags))}"
    if lacking:
        return f"no node has the tag {', '.join(lacking)} ({tags})"
    return f"no node has the tags {', '.join(sorted(need.tags))} at once, and engines at all ({tags})"


def _name(group: Group, seen: Seen) -> str:
    return group.name if group.most == 1 else f"{group.name}-{seen.id[:8]}"


def _told(seen: Sequence[Seen]) -> str:
    rows = [
        f"{s.id[:8]} ({', '.join(f'{k}={v}' for k, v in sorted(s.labels.items()) if '/' not in k) or 'no labels'})"
        for s in seen
    ]
    return "; ".join(rows) or "no node at all"
