"""The seam between what is to run (`supervisor`) and where it can (`machine`, `ray`).

A launcher knows the nodes that are there and starts processes on them. Whatever it has started ends with `close`, and with this
process, however that ends. It decides nothing: places come from `tags`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import processes.supervised
from scheduler.cluster.tags import Capacity, Place, Seen

DEVICES = "CUDA_VISIBLE_DEVICES"
SECRET = "HEADGATE_"
"""The prefix of variables that engines must not see: keys, and the store's address."""


@dataclass(frozen=True, slots=True)
class Job:
    """A process to start at a place.

    In `argv` and `env`, `{python}` is the node's interpreter, `{host}` the address at which other nodes find the process and
    `{port}` a free port there; `{first_host}` and `{first_port}` are those of the first job that is started together with it.
    """

    place: Place
    argv: tuple[str, ...]
    env: Mapping[str, str]
    trusted: bool
    """True if the process sees the node's variables that begin with `SECRET`. None of them is ever sent to a node."""
    reserve: Capacity
    """The resources reserved for it alone; none where it takes turns with others."""


class Running(processes.supervised.Running, Protocol):
    """A process that was started at a place, and where it can be reached."""

    host: str
    port: int


class Launcher(Protocol):
    """Nodes, and processes on them."""

    async def open(self) -> None:
        """Comes to the nodes. Raises ClusterError."""
        ...

    async def seen(self) -> list[Seen]:
        """The nodes that are there now, always in the same order."""
        ...

    async def start(self, jobs: Sequence[Job]) -> list[Running]:
        """Starts all of these or none. Raises ClusterError, ChildDied, or OSError."""
        ...

    async def close(self) -> None:
        """Lets go of the nodes."""
        ...


def filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with every `{name}` that has a value replaced; other braces stay as they are."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def visible(jobs: Sequence[Job], own: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """The variable that says which GPUs each of these jobs sees; `own`: the GPUs that each has. Nothing for one that has none.

    Jobs that start together on one node see the GPUs of all of them, in their order: so the n-th rank of a node, which has one
    GPU, has the n-th that it sees, as LOCAL_RANK says.
    """
    found = []
    for job, devices in zip(jobs, own, strict=True):
        beside = [
            device
            for other, theirs in zip(jobs, own, strict=True)
            for device in theirs
            if other.place.node == job.place.node
        ]
        found.append({DEVICES: ",".join(dict.fromkeys(beside))} if devices else {})
    return found
