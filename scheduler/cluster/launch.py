"""The interface between the supervisor and the launchers (`machine`, `ray`).

A launcher finds nodes and starts processes on them. Its processes end with `close`, and with this process, however that ends. It
decides nothing: placements come from `tags`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import headgate.processes.supervised
from scheduler.cluster.tags import Capacity, DiscoveredNode, Placement

DEVICES = "CUDA_VISIBLE_DEVICES"
SECRET = "HEADGATE_"
"""The prefix of variables that engines must not receive: keys, and the store's address."""


@dataclass(frozen=True, slots=True)
class Job:
    """A process to start at its placement.

    In `argv` and `env`, `{python}` is the node's interpreter, `{host}` the address at which other nodes find the process and
    `{port}` a free port there; `{first_host}` and `{first_port}` are those of the first job of the same start.
    """

    placement: Placement
    argv: tuple[str, ...]
    env: Mapping[str, str]
    trusted: bool
    """True if the process inherits the node's variables with the prefix `SECRET`. They are never sent to a node."""
    reserve: Capacity
    """The resources reserved for it alone; none on a node where processes take turns."""


class Running(headgate.processes.supervised.Running, Protocol):
    """A started process and its address."""

    host: str
    port: int


class Launcher(Protocol):
    """Nodes, and processes on them."""

    async def open(self) -> None:
        """Connect to the nodes. Raise ClusterError."""
        ...

    async def discover(self) -> list[DiscoveredNode]:
        """Return the present nodes, always in the same order."""
        ...

    async def start(self, jobs: Sequence[Job]) -> list[Running]:
        """Start all jobs or none. Raise ClusterError, ChildDied, or OSError."""
        ...

    async def close(self) -> None:
        """Disconnect from the nodes."""
        ...


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with every `{name}` that has a value replaced; other braces stay."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def visible(jobs: Sequence[Job], own: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return the variable of visible GPUs for each job; nothing for a job without GPUs. `own`: the GPUs of each job.

    Jobs that start together on one node see the GPUs of all of them, in order, so that the n-th rank of a node uses the n-th
    visible GPU, by LOCAL_RANK.
    """
    variables = []
    for job, devices in zip(jobs, own, strict=True):
        shared = [
            device
            for other, theirs in zip(jobs, own, strict=True)
            for device in theirs
            if other.placement.node == job.placement.node
        ]
        variables.append({DEVICES: ",".join(dict.fromkeys(shared))} if devices else {})
    return variables
