"""Several processes that train one model: their mesh, the weights' shards, and what the ranks say to one another.

Imports torch.distributed, as its parts `context_parallel`, `tensor_parallel` and `shards` do, and no other module. Owns the
process group. FSDP2 shards a model by layers; it also carries mixed precision, so a single rank with bf16 compute has a process
group of one.
Invariants: gradients of ranks are summed, not averaged, and accumulate in the precision of the weights; between passes every
weight is a shard, so that an optimizer step is never followed by a pass with old weights. Every function that says so is
collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.errors import ConfigError, RankLost
from trainer.model import tensor_parallel
from trainer.model.context_parallel import ContextExchange
from trainer.sections.parallel import ParallelSettings

T = TypeVar("T")
_BEAT_S = 5.0
_TRIES, _BETWEEN_S = 40, 0.05
"""How often a rank that is gone is looked for. Not until a moment, since this process may be suspended meanwhile."""
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
        self._talk: Any = None
        """The group for objects: on the CPU, and within `timeout_s`."""
        self.aside: Ranks = self
        """The same ranks, for what they do together beside their steps: in a thread of its own."""

    @property
    def leads(self) -> bool:
        """True for rank 0, which alone speaks to the gateway and to the disk."""
        return self.rank == 0

    def shard(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        compute: torch.dtype | None = None,
        passes: Sequence[str] = (),
    ) -> None:
        """Spreads the weights over the ranks, one shard for each of `layers` and one for the rest of `model`. Collective.

        `compute` is the precision of a pass, if it is not that of the weights. All passes go through `model` itself, or through
        its methods `passes`. The weights may be on the meta device still.
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
        options: dict[str, Any] = {"mesh": self._copies, "mp_policy": policy, "reshard_after_forward": True}
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
    def together(self) -> int:
        """Neighbouring ranks that compute each micro-batch together."""
        return self._settings.context * self._settings.tensor

    @property
    def shares(self) -> int:
        """Micro-batches that are computed at a time."""
        return self.size // self.together

    @property
    def share(self) -> int:
        """The number of the micro-batch, of those, on which this rank computes."""
        return self.rank // self.together

    @property
    def counts(self) -> bool:
        """True for the rank that counts the figures of its share: they are alike on the ranks that compute it together."""
        return self.rank % self.together == 0

    def divide(self, model: Any) -> None:
        """Divides a Hugging Face model's matrices by `[parallel] tensor`, before `shard`. Raises ConfigError. Collective."""
        if (ranks := self._settings.tensor) > 1:
            tensor_parallel.divide(model, tensor_parallel.plan_of(model, ranks), self.mesh["tensor"])

    @cached_property
    def exchange(self) -> ContextExchange | None:
        """The ranks that compute a micro-batch together; None without any. The first use is collective."""
        if self._settings.context == 1:
            return None
        group, _ = dist.new_subgroups(self._settings.context)
        return ContextExchange(group)

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks by `replicate`, `shard` and `tensor`. The first use is collective."""
        if self._mesh is None:
            start(self._settings.timeout_s, self.device)
            replicate, tensor = self._settings.replicate, self._settings.tensor
            sizes = {"replicate": replicate, "shard": self.size // (replicate * tensor), "tensor": tensor}
            used = {name: size for name, size in sizes.items() if name == "shard" or size > 1}
            self._mesh = init_device_mesh(
                torch.device(self.device).type, tuple(used.values()), mesh_dim_names=tuple(used)
            )
        return self._mesh

    @property
    def _copies(self) -> DeviceMesh:
        """The mesh without `tensor`: the ranks that have the same part of every matrix, or shards of it."""
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name != "tensor")
        return self.mesh[names]

    @property
    def talk(self) -> Any:
        """The process group for objects, which is on the CPU; None for one rank."""
        return self._talk

    def from_first(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank. Collective."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._talk)
        return box[0]

    def order(self, value: Any = None) -> Any:
        """Like `from_first`, after a barrier in which rank 0 and each other rank hear of each other. Collective."""
        if self.size > 1:
            limit = timedelta(seconds=self._settings.timeout_s)
            dist.monitored_barrier(self._talk, timeout=limit)
        return self.from_first(value)

    @property
    def beat_s(self) -> float:
        """Seconds between two orders at most: for a longer silence than `timeout_s`, the other ranks take rank 0 for lost."""
        return min(_BEAT_S, self._settings.timeout_s / 4)

    def of_all(self, value: T) -> list[T]:
        """Every rank's value, in the ranks' order. Collective."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._talk)
        return found

    @contextmanager
    def within(self, step: str) -> Iterator[None]:
        """A rank that is lost in the block is reported with its number and the step's name. Raises RankLost."""
        try:
            yield
        except RuntimeError as error:
            if not _is_loss(error):
                raise
            why = str(error).strip().splitlines()[0]
            gone = self._gone()
            whom = f"rank {', '.join(map(str, gone))}" if gone else "another rank"
            raise RankLost(
                f"rank {self.rank} lost {whom} in step '{step}': it ended, or was silent for [parallel] timeout_s ="
                f" {self._settings.timeout_s:g} s; its own log says why ({why})"
            ) from error

    def _gone(self) -> list[int]:
        """The ranks whose connections are closed, by their end or since they did not answer; empty if none is before long."""
        others = [rank for rank in range(self.size) if rank != self.rank] if self._talk is not None else []
        for _ in range(_TRIES):
            if gone := [rank for rank in others if not self._reaches(rank)]:
                return gone
            time.sleep(_BETWEEN_S)
        return []

    def _reaches(self, rank: int) -> bool:
        """False if the connection to a rank is closed; what is sent here, nobody receives."""
        try:
            dist.isend(torch.zeros(1), rank, group=self._talk, tag=_PROBE_TAG)
        except RuntimeError:
            return False
        return True

    def leave(self) -> None:
        """Ends the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._mesh = self._talk = self.aside._talk = None


def join(settings: ParallelSettings, device: str) -> Ranks:
    """This process among those that torchrun's environment tells of; the only one without it. Collective.

    Raises ConfigError if their number does not fit `[parallel]`, and RankLost if they do not find each other.
    """
    rank, size = own_rank(), int(os.environ.get("WORLD_SIZE", "1"))
    check(settings, size)
    ranks = Ranks(rank, size, _own_device(device), settings)
    if size > 1:
        with ranks.within("start"):
            start(settings.timeout_s, ranks.device)
            ranks.aside = Ranks(rank, size, ranks.device, settings)
            for each in (ranks, ranks.aside):
                each._talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_s))
    return ranks


def own_rank() -> int:
    """This process's number among the ranks; 0 without torchrun's environment."""
    return int(os.environ.get("RANK", "0"))


def check(settings: ParallelSettings, size: int) -> None:
    """Refuses a number of ranks that `[parallel]` cannot divide. Raises ConfigError."""
    sizes = {"replicate": settings.replicate, "shard": settings.shard, "tensor": settings.tensor}
    product = math.prod(n for n in sizes.values() if n is not None)
    said = " times ".join(
        f"{name} = {n}" for name, n in sizes.items() if n is not None and (n > 1 or name == "shard")
    )
    if settings.shard is not None and product != size:
        wanted = f"[parallel] {said} needs {product} ranks"
    elif size % product:
        wanted = f"[parallel] {said} needs a multiple of {product} ranks"
    elif size % settings.context:
        wanted = f"[parallel] context = {settings.context} needs a multiple of as many ranks"
    else:
        return
    least = product if settings.shard is not None else math.lcm(product, settings.context)
    raise ConfigError(
        f"{wanted}, but {size} run: start them with torchrun --nproc-per-node {least} -m trainer.cli run CONFIG, or with"
        " [trainer] ranks of a cluster's file"
    )


def start(timeout_s: float, device: str) -> None:
    """Makes the process group that torchrun's environment describes, or one of this process alone. Collective."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    limit = timedelta(seconds=timeout_s)
    store: dist.Store = dist.HashStore()
    rank, size = own_rank(), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        # torchrun keeps its store over restarts, and with it the addresses of ranks that are gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", next(rendezvous("env://", timeout=limit))[0])
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)


def _own_device(device: str) -> str:
    """This rank's GPU: the one of its local number, or the first where the launcher shows it that one alone."""
    if device != "cuda":
        return device
    if not (count := torch.cuda.device_count()):
        raise ConfigError(
            '[run] device = "cuda", but PyTorch finds no GPU: look at the driver and at whether torch is the build for CUDA;'
            ' "cpu" computes without one'
        )
    index = int(os.environ.get("LOCAL_RANK", "0")) % count
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _is_loss(error: RuntimeError) -> bool:
    """True for what torch.distributed raises when a rank is gone; gloo's errors have no type of their own."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in said or "monitoredbarrier" in said


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that training changes, by name: tied weights once, sharded weights as shards.

    All parameters and persistent buffers; where parameters are frozen, those that are not.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    some = any(not parameter.requires_grad for parameter in model.parameters())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not some or tensor.requires_grad:
            found.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in found.values()}


def own(model: nn.Module) -> None:
    """Gives weights and buffers that are views of a file memory of their own, which can be freed for a while (`offload`).

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
    """Frees what passes have gathered of the weights: each rank has its shards alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def move(source: nn.Module, target: nn.Module, place: Callable[[nn.Module], nn.Module]) -> None:
    """Gives `target` the weights, or their shards, and the buffers of `source`, a model of the same modules and as sharded.

    `place` says where in a module of `target` they belong. Whether a weight is trained is as `target` has it.
    """
    reshard(source)
    for name, module in source.named_modules():
        other = place(target.get_submodule(name))
        for key, weight in module._parameters.items():
            if weight is not None:
                mine = other._parameters[key]
                assert mine is not None
                other._parameters[key] = weight.requires_grad_(mine.requires_grad)
        other._buffers.update(module._buffers)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(
    state: State, ranks: Ranks, dtype: torch.dtype | None = None, kept: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return a copy of a state on the CPU, one whole tensor after another; empty on all ranks but the first. Collective.

    Tied weights share their memory, as a model's own do. `dtype` is that of the result's real numbers, but for the tensors
    `kept`; None changes none.
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) not in seen:
            value = whole(tensor.detach()) if isinstance(tensor, Tensor) else tensor()
            rounded = dtype is not None and value.is_floating_point() and name not in kept
            target = dtype if rounded else value.dtype
            seen[id(tensor)] = value.to("cpu", target, copy=True) if ranks.leads else value.new_empty(0)
        if ranks.leads:
            found[name] = seen[id(tensor)]
    return found


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copies a whole tensor, which every rank has, into a weight or its shard."""
    if isinstance(target, DTensor):
        value = distribute_tensor(
            value.to(target.device, target.dtype), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(value)


def divide_and_clip(model: nn.Module, divisor: float, largest: float) -> float:
    """Divides the gradients, and cuts their norm to `largest`; returns the norm before the cut. Collective."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= divisor
    return float(whole(torch.nn.utils.clip_grad_norm_(parameters, largest)))
