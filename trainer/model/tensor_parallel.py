"""Tensor parallelism: ranks that share each matrix product of a layer, by the plan that transformers has for its architecture.

A part of `parallel`. Every weight becomes a DTensor: split over the ranks by the plan, else whole on each (embedding,
norms, head). Attention then sees this rank's heads alone, and all else what a single rank sees. Owns no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from trainer.errors import ConfigError
from trainer.model import vision


class _Whole(ParallelStyle):
    """A module with one input and one output, whose weights every rank has; `dim` is the input's that the ranks share, if any."""

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self._placements = (Replicate() if dim is None else Shard(dim),)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def spread(_: nn.Module, given: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(given[0], mesh, self._placements, run_check=False), *given[1:])

        def local(_: nn.Module, found: Any, mesh: DeviceMesh) -> Any:
            return found.redistribute(mesh, self._placements).to_local()

        return distribute_module(module, device_mesh, None, spread, local)


_HEADS_DIM = 2
"""The dimension of heads in the input of the norms of queries and keys, shape (1, tokens, heads, size)."""
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: _Whole(_HEADS_DIM),
}


def divide(model: Any, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divide the weights of a Hugging Face model, which may be on the meta device, over a mesh of one dimension. Collective."""
    tied = list(_tied(model))
    styles = {
        name: _style(model, name, plan)
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    parallelize_module(model, mesh, styles)
    for module, first in tied:
        module.weight = first.weight


def plan_of(model: Any, ranks: int) -> Mapping[str, str]:
    """Return how to divide a model: styles by the names of modules in its decoder. Raise ConfigError, alike on every rank."""
    config, name = model.config.get_text_config(), type(model).__name__
    plan = config.base_model_tp_plan
    if vision.towers(model):
        raise _refused(ranks, f"{name} takes images, and such a model is not divided")
    if not plan:
        raise _refused(ranks, f"transformers has no plan for {name}")
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, None)) is not None and heads % ranks:
            raise _refused(ranks, f"{name} has {heads} {key}, which cannot be divided by it")
    if unknown := {module: style for module, style in plan.items() if style not in _STYLES}:
        module, style = next(iter(unknown.items()))
        raise _refused(
            ranks, f"the plan for {name} has {module} as {style!r}, which this trainer does not know"
        )
    return plan


def _style(model: Any, name: str, plan: Mapping[str, str]) -> ParallelStyle:
    """Return how a module is divided, by its name in the whole model."""
    decoder = f"{model.base_model_prefix}."
    inner = name.removeprefix(decoder)
    found = [style for pattern, style in plan.items() if fnmatchcase(inner, pattern)]
    return _STYLES[found[0]]() if found else _Whole()


def _tied(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Return modules whose `weight` is that of an earlier one, with that one."""
    first_of: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and first_of.setdefault(id(weight), module) is not module:
            yield module, first_of[id(weight)]


def _refused(ranks: int, why: str) -> ConfigError:
    return ConfigError(
        f"[parallel] tensor = {ranks}: {why}; weights that do not fit on a device are spread by `shard`"
    )
