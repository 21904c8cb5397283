"""The GPUs of this machine, as NVIDIA's driver lists them, for the files that `gateway init` writes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

_LIMIT_S = 30.0
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs that programs here may use."""

    gpus: int = 0
    name: str = ""
    gib: float = 0.0
    """The memory of the smallest GPU."""

    def __str__(self) -> str:
        if not self.gpus:
            return "no GPU: the engine and the trainer compute on the CPU"
        return f"{self.gpus} x {self.name}, {self.gib:.0f} GiB"


def this_machine() -> Machine:
    """Return this machine; one whose driver does not answer has no GPU."""
    try:
        listed = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Machine()
    return machine_of(listed.stdout if listed.returncode == 0 else "", os.environ.get("CUDA_VISIBLE_DEVICES"))


def machine_of(listed: str, visible: str | None) -> Machine:
    """Return the machine that the driver lists, a line for each GPU. `visible`: CUDA_VISIBLE_DEVICES, which hides GPUs."""
    gpus = [line.rpartition(",") for line in listed.splitlines() if line.strip()]
    if visible is not None:
        gpus = gpus[: sum(name.strip() not in ("", "-1") for name in visible.split(","))]
    if not gpus:
        return Machine()
    sizes = [float(size) / 1024 for _, _, size in gpus if size.strip().isdecimal()]
    return Machine(len(gpus), gpus[0][0].strip(), min(sizes, default=0.0))
