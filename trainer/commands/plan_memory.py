"""`trainer plan-memory`: predicts a rank's memory by parts, and lists what to change until a run fits. No weights are needed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from scheduler.cluster import sharing
from scheduler.cluster.sharing import Fit
from trainer.config.model import ModelSettings
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.memory_plan import GIB, Change, Prediction, Shapes, advise, checkpoint_bytes, predict, width
from trainer.model import pretrained, process_group, shapes

_UNITS = {"GiB": GIB, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a run needs on each rank, and the changes that save some."""

    ranks: int
    weights: int
    """The number of the model's weights, trained or not."""
    prediction: Prediction
    memory: int | None
    """Bytes of one device; None if none were named."""
    changes: tuple[Change, ...]
    engine: Fit | None = None
    """How a rank fits with an engine on its device; None if no engine was named."""
    engine_args: tuple[str, ...] = ()
    """The arguments that hold the engine to its part of the device."""

    @property
    def fits(self) -> bool | None:
        """None without a device's memory."""
        if self.memory is None:
            return None
        alone = self.prediction.needed <= self.memory
        return alone and (self.engine is None or self.engine.kind != "not at all")

    def to_json(self) -> dict[str, Any]:
        """Return the plan; sizes in bytes."""
        return {
            "ranks": self.ranks,
            "weights": self.weights,
            **asdict(self.prediction),
            "total": self.prediction.total,
            "reserved": self.prediction.reserved,
            "needed": self.prediction.needed,
            "memory": self.memory,
            "fits": self.fits,
            "engine": None if self.engine is None else asdict(self.engine),
            "engine_args": self.engine_args,
            "changes": [{"set": each.name, "needed": each.prediction.needed} for each in self.changes],
        }

    def lines(self) -> Iterator[str]:
        """Yield a table for people."""
        yield f"{self.weights / 1e9:.2f} billion weights, {self.ranks} rank{'s' * (self.ranks > 1)}; GiB of each rank's device:"
        yield from _rows(self.prediction.device)
        yield _row("all tensors", self.prediction.total)
        yield (
            _row("reserved", self.prediction.reserved)
            + f"  ({self.prediction.lost:.1%} lost between tensors)"
        )
        yield _row("needed", self.prediction.needed) + "  (with the device's own: assumed)"
        if any(self.prediction.host.values()):
            yield "GiB of the host's memory, for the first rank:"
            yield from _rows(self.prediction.host)
        if self.memory is None:
            return
        alone = self.prediction.needed <= self.memory
        yield f"{'fits' if alone else 'does not fit'} into {self.memory / GIB:.1f} GiB"
        if self.engine is not None:
            yield f"with the engine {self.engine.kind}: {self.engine.why}"
            yield f"[engine] args = {json.dumps(self.engine_args)}"
        for change in self.changes:
            yield _row(change.name, change.prediction.needed)
        if self.changes and self.changes[-1].prediction.needed > self.memory:
            yield "more ranks do not make it fit: train adapters ([model.lora]), or take a smaller model or a larger device"


def plan(
    settings: Settings, ranks: int | None = None, memory: int | None = None, engine: int | None = None
) -> MemoryPlan:
    """Return the plan of a run on `ranks` (those that `[parallel]` names, or one). Raise ConfigError.

    `engine`: what an engine takes of the same device while it works; asleep, it keeps what any process keeps.
    """
    mesh = settings.parallel
    if mesh.tensor > 1:
        raise ConfigError(
            f"[parallel] tensor = {mesh.tensor}: the memory of tensor-parallel layers is not predicted; plan"
            " with `shard` instead"
        )
    count = ranks or math.lcm((mesh.shard or mesh.expert) * mesh.replicate, mesh.context)
    process_group.check(mesh, count)
    prediction = _predicted(settings, count)
    changes = advise(_predicted, settings, count, memory) if memory is not None else []
    weights = _shapes(settings).weights.all
    if engine is None or memory is None:
        return MemoryPlan(count, weights, prediction, memory, tuple(changes))
    shared = _with_engine(settings, prediction.needed / GIB, memory / GIB, engine / GIB)
    args = sharing.engine_args(engine / memory, memory / GIB, weights * width(settings) / GIB)
    return MemoryPlan(count, weights, prediction, memory, tuple(changes), shared, args)


def _with_engine(settings: Settings, own_gb: float, device_gb: float, engine_gb: float) -> Fit:
    """Return how a rank fits with an engine: in turn only if its nodes are released and its weights then leave."""
    leaves = bool(settings.gateway.nodes) and settings.gateway.offload != "none"
    idle_gb = sharing.IDLE_GB if leaves else own_gb
    asleep_gb = sharing.IDLE_GB if leaves else engine_gb
    return sharing.fit(device_gb, sharing.Need(engine_gb, asleep_gb), sharing.Need(own_gb, idle_gb))


def _predicted(settings: Settings, ranks: int) -> Prediction:
    algorithm = settings.algorithm.create()
    # Without its adapters, a model is its own reference.
    reference = settings.model.lora is None and bool(algorithm.needs_reference or algorithm.reward_kl)
    return predict(_shapes(settings), settings, ranks, reference=reference)


def checkpoint_size(settings: Settings) -> int:
    """Return the bytes of a checkpoint of a run, by its model's shapes."""
    shapes = _shapes(settings)
    return checkpoint_bytes(shapes.weights.trained, shapes.matrices, settings)


def _shapes(settings: Settings) -> Shapes:
    mesh, entropy_grad = settings.parallel, settings.algorithm.create().needs_entropy
    return _measured(settings.model, -(-settings.batch.tokens // mesh.context), entropy_grad, mesh.expert)


@cache
def _measured(model: ModelSettings, tokens: int, entropy_grad: bool, expert_ranks: int) -> Shapes:
    dtype = pretrained.DTYPES[model.dtype]
    with shapes.GroupedShapes():
        return shapes.measure(model, tokens, dtype, entropy_grad=entropy_grad, expert_ranks=expert_ranks)


def bytes_of(text: str, option: str = "--memory") -> int:
    """Return `80GiB` as a number of bytes. Raise ConfigError, also without a unit."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"{option} {text}: a number with GiB, GB, MiB or MB is needed, such as 80GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def engine_bytes(text: str, memory: int | None) -> int:
    """Return `32GiB`, or a share of the device such as `0.4`, as a number of bytes. Raise ConfigError."""
    if memory is None:
        raise ConfigError("--engine needs --memory: the device that engine and trainer share")
    try:
        share = float(text)
    except ValueError:
        return bytes_of(text, "--engine")
    if not 0 < share <= 1:
        raise ConfigError(
            f"--engine {text}: a share of the device up to 1 is needed, or a size such as 32GiB"
        )
    return int(share * memory)


def _rows(parts: Mapping[str, int]) -> Iterator[str]:
    return (_row(name, size) for name, size in parts.items() if size)


def _row(name: str, size: int) -> str:
    return f"  {name:<48}{size / GIB:>10.2f}"
