"""The machine: driver, a large product of matrices in bf16, copies between host and device, and the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.checks.place import Figures, Place

_GB = 1e9


def measure(place: Place) -> Figures:
    """Return rates: TFLOP/s of a product, GB/s of copies (pageable and pinned, both ways) and of the disk with fsync."""
    size = 256 if place.dry else 8192
    count = 2**20 if place.dry else 2**30
    figures: Figures = {
        "torch": torch.__version__,
        "gpu": place.gpu or None,
        "bf16_tflops": 2 * size**3 / _seconds(place, _product(place, size)) / 1e12,
        "disk_write_gb_s": count / _GB / _seconds(place, lambda: _write(place, count)),
    }
    if not place.dry:
        free, total = torch.cuda.mem_get_info()
        figures |= {"free_gib": free / 2**30, "memory_gib": total / 2**30, "cuda": torch.version.cuda}
    for name, pinned in (("pageable", False), ("pinned", True)):
        host = torch.empty(count, dtype=torch.uint8, pin_memory=pinned and not place.dry)
        device = torch.empty(count, dtype=torch.uint8, device=place.device)
        figures[f"to_device_{name}_gb_s"] = count / _GB / _seconds(place, partial(device.copy_, host))
        figures[f"to_host_{name}_gb_s"] = count / _GB / _seconds(place, partial(host.copy_, device))
    return figures


def _product(place: Place, size: int) -> Callable[[], object]:
    left = torch.randn(size, size, device=place.device, dtype=torch.bfloat16)
    return lambda: left @ left


def _write(place: Place, count: int) -> None:
    with (place.folder / "bytes").open("wb") as file:
        file.write(bytes(count))
        file.flush()
        os.fsync(file.fileno())


def _seconds(place: Place, act: Callable[[], object], times: int = 5) -> float:
    """Return the fewest seconds of one run, of some, after one that does not count."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        act()
        if not place.dry:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])
