"""A device's own account: the most memory that its tensors took, as PyTorch's allocator counts it, and when it is done.

The CPU does not count, and is always done.
"""

from __future__ import annotations

import torch

_GIB = 2**30


def peaks(device: str) -> dict[str, float]:
    """The peaks of this process so far: what tensors took, and what the allocator held for them; nothing on the CPU."""
    if not device.startswith("cuda"):
        return {}
    return {
        "memory_peak_gib": torch.cuda.max_memory_allocated(device) / _GIB,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
    }


def finish(device: str) -> None:
    """Waits until the device has computed what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
