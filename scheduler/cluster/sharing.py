"""Decides whether an engine and a rank of the trainer fit on one GPU: together, in turn, or not at all.

Pure arithmetic, in GiB of one GPU. In turn means that one frees its memory while the other works: an engine sleeps, or
a trainer offloads its weights (docs/topics/scheduler.md, lending).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler.cluster.errors import OutOfMemory
from scheduler.cluster.tags import Assignment, NodeInUse

IDLE_GB = 1.5
"""GB that a process keeps on a GPU after it has freed its memory: libraries and queues. Assumed, not measured."""
SHARE = 0.92
"""vLLM's default of `--gpu-memory-utilization`."""
_WORK_GB = 3.0
"""GB of an engine's passes and CUDA graphs. Assumed, not measured."""
Kind = Literal["together", "in turn", "not at all"]


@dataclass(frozen=True, slots=True)
class Need:
    """The memory of one process on its GPU, while it works and while another does."""

    work_gb: float
    idle_gb: float = IDLE_GB


@dataclass(frozen=True, slots=True)
class Fit:
    """How two processes fit on one GPU, and the arithmetic."""

    kind: Kind
    why: str


def fit(gpu_gb: float, engine: Need, trainer: Need) -> Fit:
    """Return how an engine and a rank of the trainer fit on a GPU."""
    both = engine.work_gb + trainer.work_gb
    sums = f"engine {engine.work_gb:.1f} + trainer {trainer.work_gb:.1f} = {both:.1f} GiB"
    if both <= gpu_gb:
        return Fit("together", f"{sums} of {gpu_gb:.1f}")
    sampling, training = engine.work_gb + trainer.idle_gb, trainer.work_gb + engine.idle_gb
    kind: Kind = "in turn" if max(sampling, training) <= gpu_gb else "not at all"
    turns = (
        f"while the engine works {engine.work_gb:.1f} + {trainer.idle_gb:.1f} = {sampling:.1f} GiB, while the trainer does"
        f" {trainer.work_gb:.1f} + {engine.idle_gb:.1f} = {training:.1f} GiB, of {gpu_gb:.1f}"
    )
    return Fit(kind, f"{sums} of {gpu_gb:.1f} together; {turns}")


def engine_args(share: float, gpu_gb: float, weights_gb: float) -> tuple[str, ...]:
    """Return vLLM's arguments for an engine with a share of a GPU, and the size of its cache in whole GiB.

    Without a size, vLLM measures what is left while it starts, and counts the growth of a trainer as its own. None is given where
    less than 1 GiB is left, or the GPU's memory is unknown (0).
    """
    args = ("--gpu-memory-utilization", f"{share:.3g}")
    cache_gb = int(share * gpu_gb - weights_gb - IDLE_GB - _WORK_GB)
    return (*args, "--kv-cache-memory-bytes", f"{cache_gb}G") if cache_gb > 0 else args


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that engines and ranks need on their GPUs, from the files of a cluster."""

    engine_gb: float | None = None
    """None: `share` of its GPU."""
    share: float = SHARE
    sleeps: bool = True
    """True if engines free their memory while they sleep."""
    trainer_gb: float | None = None
    """The memory of a rank; None: unknown."""
    offloads: bool = True
    """True if the trainer offloads its weights while its nodes are released."""
    turns: bool = True
    """True if the trainer claims and releases its nodes."""

    def engine(self, gpu_gb: float) -> Need:
        work = self.share * gpu_gb if self.engine_gb is None else self.engine_gb
        return Need(work, IDLE_GB if self.sleeps and self.turns else work)

    @property
    def trainer(self) -> Need | None:
        """The need of a rank on its GPU; None: unknown."""
        if self.trainer_gb is None:
            return None
        return Need(self.trainer_gb, IDLE_GB if self.offloads and self.turns else self.trainer_gb)


def shared_nodes(nodes: Sequence[NodeInUse], assignment: Assignment, memory: Memory) -> list[str]:
    """Return a line for each node on whose GPUs both engines and ranks run. Raise OutOfMemory if they do not fit."""
    lines = []
    for node in nodes:
        gpu_gb, trainer = node.group.gpu_memory_gb, memory.trainer
        engines = {i for place in assignment.engines if place.node == node for i in place.devices}
        ranks = {i for place in assignment.ranks if place.node == node for i in place.devices}
        if gpu_gb is None:
            if engines & ranks:
                lines.append(
                    f"{node.name}: no gpu_memory_gb is given, so it is unknown whether its memory suffices"
                )
            continue
        if engines:
            _check_alone(node, "an engine", memory.engine(gpu_gb), gpu_gb, "[engine] gpu_memory_gb")
        if ranks and trainer is not None:
            _check_alone(node, "a rank of the trainer", trainer, gpu_gb, "[trainer] gpu_memory_gb")
        if engines & ranks:
            lines.append(f"{node.name}: {_shared(node, gpu_gb, memory)}")
    return lines


def _check_alone(node: NodeInUse, what: str, need: Need, gpu_gb: float, key: str) -> None:
    if need.work_gb > gpu_gb:
        raise OutOfMemory(
            f"node {node.name}: {what} needs {need.work_gb:.1f} GiB of a GPU ({key}), which has {gpu_gb:.1f}"
        )


def _shared(node: NodeInUse, gpu_gb: float, memory: Memory) -> str:
    """Describe how an engine and a rank share a GPU. Raise OutOfMemory."""
    if memory.trainer is None:
        return (
            "an engine and the trainer share a GPU; set [trainer] gpu_memory_gb (`trainer plan-memory` predicts it) to check"
            " whether they fit"
        )
    found = fit(gpu_gb, memory.engine(gpu_gb), memory.trainer)
    if found.kind != "not at all":
        return f"engine and trainer fit {found.kind}: {found.why}"
    raise OutOfMemory(
        f"node {node.name}: engine and trainer do not fit on one GPU: {found.why}; {_advice(memory)}"
    )


def _advice(memory: Memory) -> str:
    ways = []
    if not memory.turns:
        ways.append("have the trainer claim its nodes ([trainer] claims)")
    if not memory.sleeps:
        ways.append('let engines sleep ([engine] sleep = "auto" of the gateway\'s file)')
    if not memory.offloads:
        ways.append('offload the trainer\'s weights ([gateway] offload = "host" of its file)')
    ways.append(
        "give the engine less (--gpu-memory-utilization) or the trainer more ranks, or place them on separate nodes"
    )
    return "; ".join(ways)
