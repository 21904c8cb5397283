"""Several processes that train one model: their mesh, the weights' shards, and the messages between ranks.

Imports torch.distributed, as its parts `context_parallel`, `expert_parallel`, `tensor_parallel` and `shards` do, and no other
module. Owns the process group. FSDP2 shards a model by layers; it also carries mixed precision, so a single rank with bf16
compute has a process group of one.
Invariants: gradients of ranks are summed, not averaged, and accumulate in the precision of the weights; between passes every
weight is a shard, so that an optimizer step is never followed by a pass with old weights. A function marked
"Collective" is called by all ranks, in the same order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer.config.parallel import ParallelSettings
from trainer.errors import ConfigError, RankLost
from trainer.model import expert_parallel, tensor_parallel
from trainer.model.context_parallel import ContextExchange
from trainer.model.expert_parallel import Experts
from trainer.model.process_group import check, is_loss, own_device, own_rank, start

T = TypeVar("T")
_BEAT_S = 5.0
_TRIES, _BETWEEN_S = 40, 0.05
"""Attempts to detect a lost rank. A count rather than a deadline, because this process may be suspended itself."""
_PROBE_TAG = 0x6C6F7374
_REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""torch 2.11 lacks it: one rank needs it for nothing, several would wait for one another."""
State = dict[str, Tensor | Callable[[], Tensor]]
"""A model's tensors by name, or the collective functions that make them whole."""


class Ranks:
    """The processes of a run, as one of them sees them; `join` makes it."""

    def __init__(self, rank: int, size: int, device: str, settings: ParallelSettings) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        """The device of this rank."""
        self._settings = settings
        self._mesh: DeviceMesh | None = None
        self._object_group: Any = None
        """The group for objects: on the CPU, and within `timeout_s`."""
        self.background: Ranks = self
        """The same ranks, for collective work in a background thread."""

    @property
    def is_rank_zero(self) -> bool:
        """True for rank 0, the only one that uses the gateway and the disk."""
        return self.rank == 0

    def shard(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        compute: torch.dtype | None = None,
        passes: Sequence[str] = (),
        experts: Experts | None = None,
    ) -> None:
        """Spread the weights over the ranks, one shard for each of `layers` and one for the rest of `model`. Collective.

        `experts`: those of `model` that are divided; each part is spread over the ranks that own it. `compute` is the precision
        of a pass, if it is not that of the weights. All passes go through `model` itself, or through its methods `passes`. The
        weights may be on the meta device still.
        Raise ConfigError if torch is too old for several ranks.
        """
        if self.size == 1 and compute is None:
            return
        if self.size > 1 and not _REDUCES_UNUSED:
            raise ConfigError(
                f"[parallel]: several ranks need torch 2.12 or later, and this is torch {torch.__version__}"
            )
        reduce = None if compute is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
        options: dict[str, Any] = {
            "mesh": _without(self.mesh, "tensor"),
            "mp_policy": policy,
            "reshard_after_forward": True,
        }
        if experts is not None:
            divided = options | {
                "mesh": _without(self._expert_mesh, "expert"),
                "shard_placement_fn": expert_parallel.sharded_dimension,
            }
            for module in experts.modules:
                fully_shard(module, **divided)
        for layer in layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        for name in passes:
            register_fsdp_forward_method(model, name)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # One rank's pass may leave weights out, such as the head's in an empty one, or an expert's.
                if _REDUCES_UNUSED:
                    module.set_reduce_scatter_unused_params(True)

    @property
    def tensor(self) -> int:
        """Ranks that divide each matrix."""
        return self._settings.tensor

    @property
    def expert(self) -> int:
        """Ranks that share the experts of a mixture."""
        return self._settings.expert

    @property
    def model_parallel_size(self) -> int:
        """Neighboring ranks that compute each micro-batch together."""
        return self._settings.context * self._settings.tensor

    @property
    def data_parallel_size(self) -> int:
        """Micro-batches that are computed at a time."""
        return self.size // self.model_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The number of the micro-batch, of those, on which this rank computes."""
        return self.rank // self.model_parallel_size

    @property
    def reports_metrics(self) -> bool:
        """True for the rank that counts the figures of its share: they are alike on the ranks that compute it together."""
        return self.rank % self.model_parallel_size == 0

    def divide(self, model: Any) -> None:
        """Divide a Hugging Face model's matrices by `[parallel] tensor`, before `shard`. Raise ConfigError. Collective."""
        if (ranks := self._settings.tensor) > 1:
            tensor_parallel.divide(model, tensor_parallel.plan_of(model, ranks), self.mesh["tensor"])

    def divide_experts(self, model: Any) -> Experts | None:
        """Divide a Hugging Face model's experts by `[parallel] expert`, before `shard`. Raise ConfigError. Collective."""
        if self._settings.expert == 1:
            return None
        return Experts(expert_parallel.modules_of(model, self._settings.expert), self._expert_mesh["expert"])

    @cached_property
    def context_exchange(self) -> ContextExchange | None:
        """The ranks that compute a micro-batch together; None without any. The first use is collective."""
        if self._settings.context == 1:
            return None
        group, _ = dist.new_subgroups(self._settings.context)
        return ContextExchange(group)

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks by `replicate`, `shard` and `tensor`. The first use is collective."""
        if self._mesh is None:
            replicate, tensor = self._settings.replicate, self._settings.tensor
            self._mesh = self._new_mesh(replicate, "tensor", tensor)
        return self._mesh

    @cached_property
    def _expert_mesh(self) -> DeviceMesh:
        """The ranks by `replicate`, `shard` (those that own the same experts) and `expert`. The first use is collective."""
        return self._new_mesh(self._settings.replicate, "expert", self._settings.expert)

    def _new_mesh(self, replicate: int, last: str, neighbors: int) -> DeviceMesh:
        start(self._settings.timeout_s, self.device)
        sizes = {"replicate": replicate, "shard": self.size // (replicate * neighbors), last: neighbors}
        used = {name: size for name, size in sizes.items() if name == "shard" or size > 1}
        return init_device_mesh(
            torch.device(self.device).type, tuple(used.values()), mesh_dim_names=tuple(used)
        )

    @property
    def object_group(self) -> Any:
        """The process group for objects, which is on the CPU; None for one rank."""
        return self._object_group

    def broadcast(self, value: Any = None) -> Any:
        """Return Rank 0's value, on every rank. Collective."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._object_group)
        return box[0]

    def command(self, value: Any = None) -> Any:
        """Broadcast rank 0's value after a barrier in which rank 0 and each other rank check each other. Collective."""
        if self.size > 1:
            limit = timedelta(seconds=self._settings.timeout_s)
            dist.monitored_barrier(self._object_group, timeout=limit)
        return self.broadcast(value)

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two orders at most: for a longer silence than `timeout_s`, the other ranks take rank 0 for lost."""
        return min(_BEAT_S, self._settings.timeout_s / 4)

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in the ranks' order. Collective."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._object_group)
        return found

    @contextmanager
    def within(self, step: str) -> Iterator[None]:
        """Yield a rank that is lost in the block is reported with its number and the step's name. Raise RankLost."""
        try:
            yield
        except RuntimeError as error:
            if not is_loss(error):
                raise
            why = str(error).strip().splitlines()[0]
            lost = self._lost_ranks()
            whom = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
            raise RankLost(
                f"rank {self.rank} lost {whom} in step '{step}': it ended, or did not respond for [parallel] timeout_s ="
                f" {self._settings.timeout_s:g} s; see its own log ({why})"
            ) from error

    def _lost_ranks(self) -> list[int]:
        """Return the ranks whose connections are closed; empty if there is none after all attempts."""
        others = (
            [rank for rank in range(self.size) if rank != self.rank] if self._object_group is not None else []
        )
        for _ in range(_TRIES):
            if lost := [rank for rank in others if not self._is_reachable(rank)]:
                return lost
            time.sleep(_BETWEEN_S)
        return []

    def _is_reachable(self, rank: int) -> bool:
        """Return false if the connection to a rank is closed. The message that is sent is never received."""
        try:
            dist.isend(torch.zeros(1), rank, group=self._object_group, tag=_PROBE_TAG)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """End the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._mesh = self._object_group = self.background._object_group = None


def join(settings: ParallelSettings, device: str) -> Ranks:
    """Return this process among those of torchrun's environment; the only rank without it. Collective.

    Raise ConfigError if their number does not fit `[parallel]`, and RankLost if they do not find each other.
    """
    rank, size = own_rank(), int(os.environ.get("WORLD_SIZE", "1"))
    check(settings, size)
    ranks = Ranks(rank, size, own_device(device), settings)
    if size > 1:
        with ranks.within("start"):
            start(settings.timeout_s, ranks.device)
            ranks.background = Ranks(rank, size, ranks.device, settings)
            for each in (ranks, ranks.background):
                each._object_group = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=settings.timeout_s)
                )
    return ranks


def _without(mesh: DeviceMesh, divided: str) -> DeviceMesh:
    """Return a mesh without one dimension: the ranks that have the same part of what it divides, or shards of that."""
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != divided)]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that training changes, by name: tied weights once, sharded weights as shards.

    All parameters and persistent buffers; where parameters are frozen, those that are not.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    some = any(not parameter.requires_grad for parameter in model.parameters())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not some or tensor.requires_grad:
            found.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in found.values()}


def own(model: nn.Module) -> None:
    """Give weights and buffers that are views of a file memory of their own, which can be freed for a while (`offload`).

    Before the first pass of a sharded model: then it remembers where its shards are.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if local(tensor).untyped_storage().resizable():
            continue
        if isinstance(tensor, DTensor):
            tensor._local_tensor = tensor._local_tensor.clone()
        else:
            tensor.data = tensor.data.clone()


def reshard(model: nn.Module) -> None:
    """Free what passes have gathered of the weights: each rank has its shards alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def move(source: nn.Module, target: nn.Module, place: Callable[[nn.Module], nn.Module]) -> None:
    """Give `target` the weights, or their shards, and the buffers of `source`, a model of the same modules and as sharded.

    `place` maps a module of `target` to where they belong. Whether a weight is trained is as `target` has it.
    """
    reshard(source)
    for name, module in source.named_modules():
        other = place(target.get_submodule(name))
        for key, weight in module._parameters.items():
            if weight is not None:
                own = other._parameters[key]
                assert own is not None
                other._parameters[key] = weight.requires_grad_(own.requires_grad)
        other._buffers.update(module._buffers)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its shards. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(
    state: State,
    ranks: Ranks,
    dtype: torch.dtype | None = None,
    kept: Collection[str] = (),
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Return a copy of a state on a device, one whole tensor after another; empty on all ranks but the first. Collective.

    Tied weights share their memory, as a model's own do. `dtype` is that of the result's real numbers, but for the tensors
    `kept`; None changes none.
    """
    found: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) not in gathered:
            value = whole(tensor.detach()) if isinstance(tensor, Tensor) else tensor()
            rounded = dtype is not None and value.is_floating_point() and name not in kept
            target = dtype if rounded else value.dtype
            gathered[id(tensor)] = (
                value.to(device, target, copy=True) if ranks.is_rank_zero else value.new_empty(0)
            )
        if ranks.is_rank_zero:
            found[name] = gathered[id(tensor)]
    return found


def on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state on the CPU; tied weights still share their memory."""
    moved: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.cpu()
    return {name: moved[id(tensor)] for name, tensor in state.items()}


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into a weight or its shard."""
    target.copy_(shard_of(value.to(target.device, target.dtype), target))


def shard_of(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, which every rank has, as `like` is sharded; else the tensor itself."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def is_sharded(tensor: Tensor, dim: int) -> bool:
    """Return true if ranks share a tensor along a dimension."""
    return isinstance(tensor, DTensor) and any(
        getattr(each, "dim", None) == dim for each in tensor.placements
    )


def divide_and_clip(model: nn.Module, divisor: float, largest: float) -> float:
    """Divide the gradients, cut their norm to `largest`, and return the norm before the cut. Collective."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= divisor
    parts = by_mesh(parameters)
    if len(parts) < 2:
        return float(whole(torch.nn.utils.clip_grad_norm_(parameters, largest)))
    norms = [
        whole(get_total_norm([weight.grad for weight in part if weight.grad is not None])) for part in parts
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for part in parts:
        clip_grads_with_norm_(part, largest, norm)
    return float(norm)


def by_mesh(weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return weights by the ranks that have their shards: torch's norm is that of one mesh."""
    found: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for weight in weights:
        found.setdefault(weight.device_mesh if isinstance(weight, DTensor) else None, []).append(weight)
    return [*found.values()]
