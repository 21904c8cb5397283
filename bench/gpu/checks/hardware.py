"""The machine: driver, a large product of matrices in bf16, copies between host and device, hashes, and the disk; and what an
update would take by these rates (`handover`), which is predicted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
from blake3 import blake3

from bench.gpu.checks.place import Figures, Place
from bench.gpu.handover import predicted

_GB = 1e9


def measure(place: Place) -> Figures:
    """Return rates: TFLOP/s of a product, GB/s of copies (pageable and pinned, both ways), of hashing and of the disk; and
    `predicted`: seconds of an update by these rates."""
    size = 256 if place.dry else 8192
    count = 2**20 if place.dry else 2**30
    figures: Figures = {
        "torch": torch.__version__,
        "gpu": place.gpu or None,
        "bf16_tflops": 2 * size**3 / _seconds(place, _product(place, size)) / 1e12,
        "disk_write_gb_s": count / _GB / _seconds(place, lambda: _write(place, count)),
        "disk_read_gb_s": count / _GB / _seconds(place, lambda: _read(place)),
    }
    data = bytes(count)
    figures["hash_gb_s"] = count / _GB / _seconds(place, lambda: blake3(data, max_threads=blake3.AUTO))
    if not place.dry:
        free, total = torch.cuda.mem_get_info()
        figures |= {"free_gib": free / 2**30, "memory_gib": total / 2**30, "cuda": torch.version.cuda}
    for name, pinned in (("pageable", False), ("pinned", True)):
        host = torch.empty(count, dtype=torch.uint8, pin_memory=pinned and not place.dry)
        device = torch.empty(count, dtype=torch.uint8, device=place.device)
        figures[f"to_device_{name}_gb_s"] = count / _GB / _seconds(place, partial(device.copy_, host))
        figures[f"to_host_{name}_gb_s"] = count / _GB / _seconds(place, partial(host.copy_, device))
    other = torch.empty_like(device)
    figures["on_device_gb_s"] = count / _GB / _seconds(place, partial(other.copy_, device))
    return figures | {"predicted": predicted(figures)}


def _product(place: Place, size: int) -> Callable[[], object]:
    left = torch.randn(size, size, device=place.device, dtype=torch.bfloat16)
    return lambda: left @ left


def _write(place: Place, count: int) -> None:
    with (place.folder / "bytes").open("wb") as file:
        file.write(bytes(count))
        file.flush()
        os.fsync(file.fileno())


def _read(place: Place) -> None:
    """Read the file of `_write` from the disk: the page cache is given up before."""
    with (place.folder / "bytes").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(2**24):
            pass


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
