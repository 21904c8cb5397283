"""The process group that torchrun's environment describes, and this process's place in it.

Owns no state: torch.distributed has one process group for each process.
"""

from __future__ import annotations

import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainer.config.parallel import ParallelSettings
from trainer.errors import ConfigError


def own_rank() -> int:
    """Return this process's number among the ranks; 0 without torchrun's environment."""
    return int(os.environ.get("RANK", "0"))


def check(settings: ParallelSettings, size: int) -> None:
    """Refuse a number of ranks that `[parallel]` cannot divide. Raise ConfigError."""
    sizes = {"replicate": settings.replicate, "shard": settings.shard, "tensor": settings.tensor}
    if settings.shard is None:
        sizes["expert"] = settings.expert
    product = math.prod(n for n in sizes.values() if n is not None)
    product_of = " times ".join(
        f"{name} = {n}" for name, n in sizes.items() if n is not None and (n > 1 or name == "shard")
    )
    if settings.shard is not None and product != size:
        wanted = f"[parallel] {product_of} needs {product} ranks"
    elif size % product:
        wanted = f"[parallel] {product_of} needs a multiple of {product} ranks"
    elif size % settings.context:
        wanted = f"[parallel] context = {settings.context} needs a multiple of that number of ranks"
    else:
        return
    least = product if settings.shard is not None else math.lcm(product, settings.context)
    raise ConfigError(
        f"{wanted}, but {size} run: start them with torchrun --nproc-per-node {least} -m trainer.cli run CONFIG, or with"
        " [trainer] ranks of a cluster's file"
    )


def start(timeout_s: float, device: str) -> None:
    """Make the process group that torchrun's environment describes, or one of this process alone. Collective."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    limit = timedelta(seconds=timeout_s)
    store: dist.Store = dist.HashStore()
    rank, size = own_rank(), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        # torchrun keeps its store over restarts, and with it the addresses of lost ranks.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", next(rendezvous("env://", timeout=limit))[0])
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)


def own_device(device: str) -> str:
    """Return this rank's GPU: the one of its local number, or the first if the launcher shows it only that one."""
    if device != "cuda":
        return device
    if not (count := torch.cuda.device_count()):
        raise ConfigError(
            '[run] device = "cuda", but PyTorch finds no GPU: check the driver, and whether torch is the build for CUDA;'
            ' "cpu" computes without one'
        )
    index = int(os.environ.get("LOCAL_RANK", "0")) % count
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def is_loss(error: RuntimeError) -> bool:
    """Return true for what torch.distributed raises when a rank is lost; gloo's errors have no type of their own."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in message or "monitoredbarrier" in message
