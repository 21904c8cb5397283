"""The cluster file: one TOML file, every key typed and bounded, unknown keys refused.

Relative paths are relative to the folder in which `scheduler run` is started, as for the gateway and the trainer. Secrets are in
the environment (`HEADGATE_ADMIN_KEY`, Ray's token), not here. The files of the gateway and the trainer are not repeated; only
their settings for the cluster are read (`GatewayFile`, `check_trainer`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from headgate.configuration import (
    Seconds,
    Section,
    complaints,
)
from scheduler.cluster.errors import BadFile
from scheduler.cluster.gateway_file import GatewayFile, table_of, tables_in
from scheduler.cluster.sharing import SHARE, Memory
from scheduler.cluster.tags import NODE_LABEL, TRAIN, Capacity, Need, NodeGroup

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,38}[A-Za-z0-9])?$")]
"""The name of a node or a group. A number is appended for each engine, and the result is the engine's name."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
"""A tag, or a label's value, in the grammar of Ray and Kubernetes."""
LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
]
MANY = 10_000


class Sized(Section):
    """A table with a capacity."""

    cpus: float | None = Field(None, ge=0, le=100_000)
    """CPU cores."""
    gpus: int | None = Field(None, ge=0, le=1024)
    """GPUs."""
    memory_gb: float | None = Field(None, ge=0, le=1_000_000)
    """GiB."""
    gpu_memory_gb: float | None = Field(None, gt=0, le=100_000)
    """GiB of one GPU: of each GPU of a node, or that a process needs on each of its GPUs while it works. The default of an
    engine is `--gpu-memory-utilization`. It does not affect placement; it finds GPUs with too little memory."""

    def capacity(self, default: Capacity) -> Capacity:
        """Return the capacity, with defaults for missing values."""
        return Capacity(
            default.cpus if self.cpus is None else self.cpus,
            default.gpus if self.gpus is None else self.gpus,
            default.memory_gb if self.memory_gb is None else self.memory_gb,
        )


class ClusterTable(Section):
    """`[cluster]`."""

    name: Name = "headgate"
    """The name of the cluster."""
    launcher: Literal["local", "ray"] = "local"
    """`local`: child processes on this machine, whose parts are the nodes. `ray`: the nodes of a Ray cluster."""
    dir: Path = Path("runs/cluster")
    """The folder of the logs, one for each process."""
    restarts: int = Field(5, ge=0, le=1000)
    """Restarts of one process within 10 minutes; after that an engine stays stopped, and a cluster without gateway or trainer
    ends."""
    poll_interval_s: float = Field(1.0, ge=0.05, le=60)
    """Seconds between two polls of nodes and engines."""


class GatewayTable(Section):
    """`[gateway]`: it runs on the machine of `scheduler run`."""

    config: Path
    """The gateway's TOML file."""
    workers: int = Field(1, ge=1, le=64)
    """Gateway processes; 2 or more need PostgreSQL."""


class TrainerTable(Sized):
    """`[trainer]`; capacities are the needs of one rank. Without the table the cluster has no trainer."""

    config: Path | None = None
    """The trainer's TOML file; its `[parallel]` divides the work among the ranks."""
    command: tuple[str, ...] = ()
    """In place of `config`: any program that follows torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, ...)."""
    ranks: int = Field(1, ge=1, le=4096)
    """The number of ranks."""
    tags: tuple[Label, ...] = ("train",)
    """Ranks run on nodes that have all of these tags."""
    claims: bool | None = None
    """True if the trainer claims its nodes from the gateway before it computes and releases them while it waits, as
    headgate's own does. Nodes of a trainer that does not are never lent: their engines are always awake."""
    env: dict[str, str] = Field({}, repr=False)
    """Additional variables of its environment."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.config is None) == (not self.command):
            raise ValueError("exactly one of `config` and `command` is needed")
        return self


class EngineTable(Sized):
    """`[engine]`; capacities are the needs of one engine."""

    command: tuple[str, ...] = ("{python}", "-m", "gateway.cli", "engine", *("--config", "{config}"),
                                *("--model", "{model}", "--tensor-parallel", "{gpus}"),
                                *("--host", "{host}", "--port", "{port}"))  # fmt: skip
    """`{python}`, `{config}` (the gateway's file), `{model}`, `{gpus}` (of the engine), `{host}` and `{port}` are replaced. The
    default starts engines by `[engine]` of the gateway's file."""
    model: str | None = Field(None, min_length=1)
    """One of the gateway's models; by default its first."""
    tags: tuple[Label, ...] = ("rollout",)
    """Engines run on nodes that have all of these tags."""
    health: str = Field("/health", pattern="^/")
    """The path that returns 200 while an engine is healthy."""
    env: dict[str, str] = Field({}, repr=False)
    """Additional variables of its environment."""
    start_s: Seconds = 300.0
    """Seconds until an engine must respond; after that it is killed and restarted."""


class NodeTable(Sized):
    """`[nodes.NAME]`: a part of this machine (`local`), or one node of the Ray cluster (`ray`)."""

    tags: tuple[Label, ...] = ()
    """The use of the node: `rollout`, `train`, or both; any other tag is a description."""
    zone: Label | None = None
    """The network zone of the node."""
    hardware: Label | None = None
    """The kind of machine."""
    labels: dict[LabelKey, Label] = Field(default_factory=dict)
    """Ray: further labels of the node."""
    engines: int | None = Field(None, ge=0, le=256)
    """The number of engines on the node; by default one if it has the engine's tags."""
    engine_gpus: int | None = Field(None, ge=1, le=64)
    """GPUs of each engine on the node, in place of `[engine] gpus`."""
    spare: bool = False
    """True: the node is used only when `[elastic]` adds it, and may be absent."""


class GroupTable(Section):
    """`[[groups]]`: nodes of one kind in a Ray cluster."""

    name: Name
    """The name of the group."""
    tags: tuple[Label, ...] = Field(min_length=1)
    """The use of these nodes."""
    zone: Label | None = None
    """The network zone of these nodes."""
    hardware: Label | None = None
    """The kind of machine."""
    labels: dict[LabelKey, Label] = Field(default_factory=dict)
    """Further labels of these nodes in Ray."""
    engines: int | None = Field(None, ge=0, le=256)
    """The number of engines on each node; by default one if it has the engine's tags."""
    engine_gpus: int | None = Field(None, ge=1, le=64)
    """GPUs of each engine on these nodes, in place of `[engine] gpus`."""
    gpu_memory_gb: float | None = Field(None, gt=0, le=100_000)
    """GiB of each GPU of these nodes."""
    count: int = Field(1, ge=0, le=MANY)
    """The number of nodes that must be present at the start."""
    most: int | None = Field(None, ge=1, le=MANY)
    """The greatest number of nodes in use; by default any number. Nodes may join later."""


class RayTable(Section):
    """`[ray]`."""

    address: str = "auto"
    """The address of a running Ray cluster; `auto`: the one on this machine."""
    wait_s: Seconds = 60.0
    """Seconds to wait for nodes, and for a placement group."""
    open: bool = False
    """True: accept a cluster without token authentication, where every client can run programs."""


class ElasticTable(Section):
    """`[elastic]`: spare nodes are added when generation is the bottleneck (StreamRL), and given back when training is. With
    `ranks`, nodes also move to training and back.

    Without it, every node is used from the start."""

    steps: int = Field(3, ge=1, le=1000)
    """Training steps in a row with the same result before a change."""
    ranks: int | None = Field(None, ge=1, le=4096)
    """The greatest number of the trainer's ranks; the first is `[trainer] ranks`. Nodes with the trainer's tags and without ranks
    move to training while it is the bottleneck, and back. The trainer restarts each time from its newest checkpoint."""


class ClusterFile(Section):
    """The whole file."""

    cluster: ClusterTable = ClusterTable()
    gateway: GatewayTable
    trainer: TrainerTable | None = None
    engine: EngineTable = EngineTable()
    nodes: dict[Name, NodeTable] = Field(default_factory=dict)
    groups: tuple[GroupTable, ...] = ()
    ray: RayTable = RayTable()
    elastic: ElasticTable | None = None

    @model_validator(mode="after")
    def _nodes_fit_the_launcher(self) -> Self:
        local = self.cluster.launcher == "local"
        if not self.nodes and not self.groups:
            raise ValueError("[nodes.NAME] is needed" + ("" if local else ", or [[groups]]"))
        if local and self.groups:
            raise ValueError("[[groups]] need a Ray cluster: name the parts of this machine as [nodes.NAME]")
        for name, node in self.nodes.items():
            if local and node.labels:
                raise ValueError(f"[nodes.{name}] labels: only the nodes of a Ray cluster have labels")
            if not local and not node.tags and not node.labels:
                raise ValueError(f"[nodes.{name}]: tags or labels are needed, to find it in the Ray cluster")
            if not local and node.capacity(Capacity()) != Capacity():
                raise ValueError(f"[nodes.{name}] cpus, gpus, memory_gb: Ray knows them; leave them out")
            if node.spare and self.elastic is None:
                raise ValueError(f"[nodes.{name}] spare: only [elastic] uses spare nodes")
            if node.spare and not self._engines(node.engines, node.tags):
                raise ValueError(f"[nodes.{name}] spare: it has no engines, and [elastic] adds nothing else")
        if self.elastic is not None and self.trainer is not None and self.unlent:
            raise ValueError(
                "[elastic] needs a trainer that reports its busy time when it releases its nodes: [trainer] claims = true"
            )
        self._check_sizes()
        self._check_ranks()
        names = [*self.nodes, *(group.name for group in self.groups)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"[[groups]]: {', '.join(twice)} would mean two")
        for group in self.groups:
            if group.most is not None and group.most < group.count:
                raise ValueError(
                    f"[[groups]] {group.name}: most = {group.most} is less than count = {group.count}"
                )
        return self

    def _check_ranks(self) -> None:
        most = self.elastic.ranks if self.elastic is not None else None
        if most is not None and (self.trainer is None or self.trainer.ranks > most):
            raise ValueError("[elastic] ranks: [trainer] is needed, with no more ranks than that")

    def _check_sizes(self) -> None:
        """Raise ValueError if `engine_gpus` has no effect, or engines must be equal."""
        tables: list[tuple[str, NodeTable | GroupTable]] = [
            *self.nodes.items(),
            *((group.name, group) for group in self.groups),
        ]
        for name, table in tables:
            if table.engine_gpus is None:
                continue
            if not self._engines(table.engines, table.tags):
                raise ValueError(f"{name}: engine_gpus: it has no engines")
            if not any("{gpus}" in part for part in (*self.engine.command, *self.engine.env.values())):
                raise ValueError(f"{name}: engine_gpus: [engine] command must contain {{gpus}}")
            if self.elastic is not None:
                raise ValueError(f"{name}: engine_gpus: [elastic] assumes that all engines are equally fast")

    @classmethod
    def load(cls, path: Path) -> ClusterFile:
        """Read a TOML file. Raise BadFile."""
        try:
            return cls.model_validate(tables_in(path))
        except ValidationError as error:
            raise BadFile("\n  ".join([f"{path}:", *complaints(error, cls)])) from error

    def wanted(self) -> tuple[NodeGroup, ...]:
        """Return the groups of nodes that the cluster needs."""
        local = self.cluster.launcher == "local"
        named = [
            NodeGroup(
                name,
                node.tags,
                node.zone or "",
                node.hardware or "",
                {NODE_LABEL: name} if local else node.labels,
                self._engines(node.engines, node.tags),
                0 if node.spare else 1,
                gpu_memory_gb=node.gpu_memory_gb,
                engine_gpus=node.engine_gpus,
            )
            for name, node in self.nodes.items()
        ]
        return (*named, *(self._group(group) for group in self.groups))

    def _group(self, given: GroupTable) -> NodeGroup:
        return NodeGroup(
            given.name,
            given.tags,
            given.zone or "",
            given.hardware or "",
            given.labels,
            self._engines(given.engines, given.tags),
            given.count,
            given.most or MANY,
            given.gpu_memory_gb,
            given.engine_gpus,
        )

    def _engines(self, given: int | None, tags: tuple[str, ...]) -> int:
        return int(set(self.engine.tags) <= set(tags)) if given is None else given

    @property
    def unlent(self) -> frozenset[str]:
        """Tags that the gateway does not get: no trainer claims such nodes, so their engines must not wait for a claim."""
        if self.trainer is None:
            return frozenset({TRAIN})
        claims = self.trainer.config is not None if self.trainer.claims is None else self.trainer.claims
        return frozenset() if claims else frozenset({TRAIN})

    @property
    def engine_need(self) -> Need:
        """The resources of one engine."""
        return Need("engines", frozenset(self.engine.tags), self.engine.capacity(Capacity()))

    @property
    def trainer_need(self) -> Need | None:
        """The resources of one rank of the trainer."""
        if self.trainer is None:
            return None
        return Need("trainer", frozenset(self.trainer.tags), self.trainer.capacity(Capacity()))


def check_trainer(path: Path, elastic: bool = False) -> int:
    """Return the number of which that of the ranks is a multiple.

    Raise BadFile if the trainer would start a gateway of its own, or if its number of ranks is fixed although `elastic`.
    """
    parallel = table_of(path, tables_in(path), "parallel")
    if elastic and "shard" in parallel:
        raise BadFile(
            f"{path}: [parallel] shard fixes the number of ranks, which [elastic] ranks changes: leave it out"
        )
    gateway = table_of(path, tables_in(path), "gateway")
    if "config" in gateway or "url" not in gateway:
        raise BadFile(f"{path}: [gateway] url is needed, and no config: the cluster starts the gateway")
    return math.prod(int(parallel.get(name, 1)) for name in ("replicate", "context", "tensor"))


def memory_of(file: ClusterFile, gateway: GatewayFile) -> Memory:
    """Return the memory that engines and ranks need on their GPUs, from all files of a cluster. Raise BadFile."""
    trainer, share = file.trainer, SHARE if gateway.share is None else gateway.share
    if trainer is None:
        return Memory(file.engine.gpu_memory_gb, share, gateway.sleeps)
    offloads = False  # unknown for a command
    if trainer.config is not None:
        offloads = (
            table_of(trainer.config, tables_in(trainer.config), "gateway").get("offload", "auto") != "none"
        )
    return Memory(
        file.engine.gpu_memory_gb,
        share,
        gateway.sleeps,
        trainer.gpu_memory_gb,
        offloads,
        turns=not file.unlent,
    )
