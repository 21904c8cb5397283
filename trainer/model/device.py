"""The device of a run: which one, what PyTorch is prepared for, and how much memory tensors took.

The CPU does not count memory, and has always finished.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from trainer.config.settings import TrainingSettings

_GIB = 2**30
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_NO_GPU = ("", "-1", "void", "none")
_MANY_WEIGHTS = 200_000_000
"""A step of a model of this size takes minutes on a CPU."""


def device_of(settings: TrainingSettings) -> str:
    """Return `[run] device`, with `auto` resolved."""
    if settings.run.device != "auto":
        return settings.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def cpu_warning(settings: TrainingSettings, weights: int, environment: Mapping[str, str] = os.environ) -> str:
    """Return a warning if `auto` is the CPU although a GPU is expected or the model is large; else an empty string."""
    if settings.run.device != "auto" or device_of(settings) != "cpu":
        return ""
    variable = next((name for name in _GPU_VARIABLES if environment.get(name, "") not in _NO_GPU), None)
    if variable is None and weights < _MANY_WEIGHTS:
        return ""
    why = (
        f"{variable} = {environment[variable]!r} names a GPU"
        if variable
        else f"the model has {weights / 1e6:,.0f} million weights"
    )
    return (
        f"warning: PyTorch finds no GPU, so this run computes on the CPU, and {why}. Is the driver installed, and is torch the"
        ' build for CUDA? [run] device = "cuda" refuses to start without a GPU, "cpu" confirms that this is intended'
    )


def prepare_torch(settings: TrainingSettings) -> None:
    """Set threads, seed and determinism of this process."""
    if settings.run.threads is not None:
        torch.set_num_threads(settings.run.threads)
    torch.manual_seed(settings.run.seed)
    torch.use_deterministic_algorithms(settings.run.deterministic)


def peaks(device: str) -> dict[str, float]:
    """Return the peaks of this process so far, in GiB: of tensors, and of the allocator; nothing on the CPU."""
    if not device.startswith("cuda"):
        return {}
    return {
        "memory_peak_gib": torch.cuda.max_memory_allocated(device) / _GIB,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
    }


def finish(device: str) -> None:
    """Wait until the device has computed all that was queued."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
