"""Memory that one process owns and others open by a handle: no byte is copied on the way.

| memory | its handle | who can open it |
|---|---|---|
| an accelerator's | CUDA IPC, by torch's own export of a storage | a process on the same accelerator |
| the host's | the name of a file of `/dev/shm` | a process with the same `/dev/shm`, of the same user |

A handle is JSON, so nothing is pickled. Invariants: an arena is exported once and kept for the life of its owner, because torch
counts an export as returned once it was opened once, and never frees one that was opened more often or not at all; its bytes
change only in `fill`, so a reader that is slower finds other bytes, and compares hashes. The files of owners
that were killed are removed when the next arena is made.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import devices
from .devices import SHARED, Device

NAME = "headgate-transfer-"
_ALIGNED = 256
"""Bytes: every tensor begins at a multiple, as kernels want it."""
Handle = Mapping[str, Any]


class Image:
    """The bytes of a file, which lie in one or several places of memory."""

    def __init__(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """`parts`: where in the file each begins, and its bytes, a vector; together they cover the file."""
        self._parts = sorted(parts, key=lambda part: part[0])

    @classmethod
    def empty(cls, size: int) -> Image:
        """Return an image in one place of the host's memory, to be filled."""
        return cls([(0, torch.empty(size, dtype=torch.uint8))])

    def span(self, start: int, end: int) -> Tensor:
        """Return bytes: a view if they lie in one place, else a copy in the host's memory. Raise ValueError for missing ones."""
        found, at = [], start
        for begin, data in self._parts:
            if begin <= at < begin + len(data):
                found.append(data[at - begin : end - begin])
                at += len(found[-1])
            if at >= end:
                break
        if at < end:
            raise ValueError(f"the bytes from {at} to {end} lie nowhere")
        return found[0] if len(found) == 1 else torch.cat([part.cpu() for part in found])

    def whole(self) -> Tensor:
        """Return all bytes."""
        return self.span(0, max(begin + len(data) for begin, data in self._parts))


class Arena:
    """One piece of memory with a copy of tensors, which other processes may open."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Take memory. `size`: bytes. Raise OSError or RuntimeError if there is not enough."""
        self._path: Path | None = None
        self.device = device
        if device.type == "cpu":
            self._path = shared_file(size)
            self._data = torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8)
            if (
                torch.cuda.is_available()
            ):  # copies from an accelerator are several times faster into pinned memory
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._data.data_ptr(), size, 0))
            self.handle: dict[str, Any] = {
                "memory": devices.shared_memory(),
                "path": str(self._path),
                "size": size,
            }
        else:
            self._data = torch.empty(size, dtype=torch.uint8, device=device)
            self.handle = {"gpu": devices.uuid(device.index or 0), **_exported(self._data)}

    def __len__(self) -> int:
        return len(self._data)

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Copy tensors in place of those before; return where each begins, and its bytes."""
        places, at, known = dict[str, tuple[int, int]](), 0, dict[int, str]()
        for name, tensor in tensors.items():
            if (tied := known.setdefault(id(tensor), name)) != name:
                places[name] = places[tied]
                continue
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._data[at : at + len(data)].copy_(data, non_blocking=True)
            places[name] = at, len(data)
            at += _aligned(len(data))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return places

    def close(self) -> None:
        """Give the host's memory back; what others have opened stays theirs."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            if torch.cuda.is_available():
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._data.data_ptr()))


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that an arena of these tensors needs; a tied one counts once."""
    once = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return max(1, sum(map(_aligned, once.values())))


def opens(handle: Handle, worker: Device) -> bool:
    """Return true if a worker can open a handle."""
    if "gpu" in handle:
        return bool(handle["gpu"]) and worker["gpu"] == handle["gpu"]
    return bool(handle["memory"]) and worker["memory"] == handle["memory"]


def opened(handle: Handle) -> Tensor:
    """Return the bytes that a handle names. Raise OSError, RuntimeError or ValueError if they are not there."""
    if "gpu" not in handle:
        path = Path(handle["path"])
        if path.parent != SHARED or not path.name.startswith(NAME):
            raise ValueError(f"{path} is not the memory of a transfer")
        return torch.from_file(str(path), shared=True, size=handle["size"], dtype=torch.uint8)
    device = torch.cuda.current_device()
    if devices.uuid(device) != handle["gpu"]:
        raise ValueError(f"it is on GPU {handle['gpu']}, and this process has {devices.uuid(device)}")
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle["export"]]
    storage = torch.UntypedStorage._new_shared_cuda(device, *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: handle["size"]]


def images(listing: Mapping[str, Any]) -> dict[str, Image]:
    """Return the files of a version that its owner shows. Raise OSError, RuntimeError or ValueError.

    `listing`: `handle`, and by file `header`, its first bytes in hexadecimal, and `parts`: where in the file and where in the
    memory each part begins, and its bytes.
    """
    data = opened(listing["handle"])
    return {
        name: Image(
            [
                (0, torch.frombuffer(bytearray.fromhex(file["header"]), dtype=torch.uint8)),
                *((start, data[place : place + size]) for start, place, size in file["parts"]),
            ]
        )
        for name, file in listing["files"].items()
    }


def _exported(data: Tensor) -> dict[str, Any]:
    """Return torch's handle of an accelerator's memory: what `_new_shared_cuda` takes after the device, bytes in hexadecimal."""
    _, *parts = data.untyped_storage()._share_cuda_()
    return {"export": [part.hex() if isinstance(part, bytes) else part for part in parts], "size": len(data)}


def shared_file(size: int) -> Path:
    """Return a new file of the shared memory, whose room is taken. Raise OSError."""
    sweep()
    descriptor, name = tempfile.mkstemp(prefix=f"{NAME}{os.getpid()}-", dir=SHARED)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(descriptor)
    return Path(name)


def sweep() -> None:
    """Remove the shared files of processes that were killed."""
    for path in SHARED.glob(f"{NAME}*"):
        found = re.fullmatch(rf"{NAME}(\d+)-.*", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            path.unlink(missing_ok=True)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
