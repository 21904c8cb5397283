"""Which accelerator and which shared memory a process has: they decide by which way two processes exchange bytes.

Owns no state. NCCL refuses two ranks on one accelerator ("Duplicate GPU detected"); containers of one machine have a
`/dev/shm` each, unless they are started with that of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

Device = Mapping[str, str]
"""A worker's: `gpu` is the UUID of its accelerator, empty without one; `memory` names its shared memory."""
SHARED = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def own() -> dict[str, str]:
    """Return the device of this process: a worker's has one accelerator."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return {"gpu": "" if index is None else uuid(index), "memory": shared_memory()}


def shared_memory() -> str:
    """Return a name that processes have in common exactly if they have the same shared memory."""
    return f"{_BOOT.read_text().strip()}:{SHARED.stat().st_dev}" if SHARED.exists() else ""


def room() -> int:
    """Return the free bytes of the shared memory."""
    found = os.statvfs(SHARED)
    return found.f_bavail * found.f_frsize


def in_common(lanes: int, workers: Iterable[Device]) -> str:
    """Return the UUID of an accelerator that is both a worker's and one of the first `lanes` of this process; else empty."""
    used = {worker["gpu"] for worker in workers}
    return next((found for found in map(uuid, range(lanes)) if found in used), "")


def uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
