"""Moves tensors of a rank off its device for a while, so that another process can use the memory, and back bit by bit.

Whole storages leave, and not tensors: shards, views and ties stay what they are, and references to tensors remain valid.
Moved tensors have no memory, and may not be used (`RankTrainer.policy` checks that).
Invariants: no memory is freed before every rank has copied all of its bytes; on disk they are in a file without a name, which
ends with the process and which no other process can read.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Literal, Protocol

import torch
from torch import Tensor, UntypedStorage

from trainer.errors import OffloadFailed
from trainer.model import parallel
from trainer.model.parallel import Ranks

Where = Literal["host", "disk"]
SLAB = 64 * 2**20
"""Bytes of one piece of the host's memory. A power of two, to which pinned memory is rounded up."""


class OffloadTarget(Protocol):
    """Bytes in the order in which they were written."""

    def write(self, data: Tensor) -> None:
        """Append a storage's bytes."""

    def read(self, data: Tensor) -> None:
        """Read the next bytes into a storage, in the order of `write`."""

    def rewind(self) -> None:
        """Finish writing, and start to read from the beginning."""

    def clear(self) -> None:
        """Discard the bytes."""


class Offload:
    """The moved tensors of one rank, if any."""

    def __init__(self, where: Where, ranks: Ranks, directory: Path) -> None:
        """`directory`: where `disk` has its file."""
        self._ranks = ranks
        self._host_too = where == "disk" or not ranks.device.startswith("cuda")
        self._target: OffloadTarget = Disk(directory, ranks.device) if where == "disk" else Host(ranks.device)
        self._moved: list[tuple[UntypedStorage, int]] = []

    def out(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' bytes to the target, and free their memory. Collective.

        Raise OffloadFailed on every rank if one of them cannot; the tensors are then as they were.
        """
        leaving = list(self._storages(tensors))
        self._agree("leave", lambda: self._copy(leaving))
        self._moved = [(storage, storage.nbytes()) for storage in leaving]
        for storage in leaving:
            storage.resize_(0)
        give_back(self._ranks.device)

    def back(self) -> None:
        """Fill the tensors again. Collective. Raise OffloadFailed, and what they hold is then undefined."""
        self._agree("return", self._fill)
        self._target.clear()
        self._moved = []

    def _copy(self, leaving: list[UntypedStorage]) -> None:
        for storage in leaving:
            self._target.write(_bytes(storage))
        self._target.rewind()
        _wait(self._ranks.device)

    def _fill(self) -> None:
        for storage, size in self._moved:
            storage.resize_(size)
            self._target.read(_bytes(storage))
        _wait(self._ranks.device)

    def _agree(self, what: str, work: Callable[[], None]) -> None:
        """Do this rank's part. Raise OffloadFailed on every rank if one of them failed."""
        why = ""
        try:
            work()
        except (OSError, RuntimeError) as error:  # the disk or the memory is full
            why = f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
        if whys := [each for each in self._ranks.all_gather(why) if each]:
            raise OffloadFailed(
                f"weights and moments cannot {what} ([gateway] offload): {'; '.join(whys)}; make room there, or choose another"
                " target; the next start continues from the newest checkpoint"
            )

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
        """Yield each storage once, if it has bytes and is in memory that is to be freed."""
        visited: set[int] = set()
        for tensor in tensors:
            local = parallel.local(tensor)
            storage = local.untyped_storage()
            leaves = storage.nbytes() and (self._host_too or local.is_cuda)
            if leaves and storage.data_ptr() not in visited:
                visited.add(storage.data_ptr())
                yield storage


class Host:
    """The host's memory: pinned for an accelerator, and then kept for the next time, since pinning is slow."""

    def __init__(self, device: str) -> None:
        self._pinned = device.startswith("cuda")
        self._slabs: list[Tensor] = []
        self._at = 0

    def write(self, data: Tensor) -> None:
        """Append without waiting for the copy."""
        for own, theirs in self._parts(data):
            own.copy_(theirs, non_blocking=True)

    def read(self, data: Tensor) -> None:
        """Read without waiting for the copy."""
        for own, theirs in self._parts(data):
            theirs.copy_(own, non_blocking=True)

    def rewind(self) -> None:
        """Start to read from the beginning."""
        self._at = 0

    def clear(self) -> None:
        """Discard the bytes."""
        self._at = 0
        if not self._pinned:
            self._slabs = []

    def _parts(self, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of the slabs from the current position, and the pieces of `data` that belong to them."""
        moved = 0
        while moved < len(data):
            slab, start = divmod(self._at, SLAB)
            if slab == len(self._slabs):
                self._slabs.append(torch.empty(SLAB, dtype=torch.uint8, pin_memory=self._pinned))
            size = min(SLAB - start, len(data) - moved)
            yield self._slabs[slab][start : start + size], data[moved : moved + size]
            self._at, moved = self._at + size, moved + size


class Disk:
    """A file without a name in a folder; bytes pass through one slab of the host's memory."""

    def __init__(self, directory: Path, device: str) -> None:
        self._directory = directory
        self._pinned = device.startswith("cuda")
        self._file: IO[bytes] | None = None
        self._slab: Tensor | None = None

    def write(self, data: Tensor) -> None:
        """Write all of it."""
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 (until `clear`)
        for part in data.split(SLAB):
            slab = self._through(len(part)).copy_(part)
            left = memoryview(slab.numpy().data)
            while left:
                left = left[self._file.write(left) :]

    def read(self, data: Tensor) -> None:
        """Raise OSError if bytes are missing."""
        assert self._file is not None
        for part in data.split(SLAB):
            slab = self._through(len(part))
            left = memoryview(slab.numpy().data)
            while left:
                if not (count := self._file.readinto(left)):  # type: ignore[attr-defined]
                    raise OSError("the file is shorter than it was")
                left = left[count:]
            part.copy_(slab)

    def rewind(self) -> None:
        """Start to read from the beginning."""
        if self._file is not None:
            self._file.seek(0)
        self._slab = None

    def clear(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._slab = None, None

    def _through(self, size: int) -> Tensor:
        if self._slab is None:
            self._slab = torch.empty(SLAB, dtype=torch.uint8, pin_memory=self._pinned)
        return self._slab[:size]


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return all of a storage, as a vector of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def give_back(device: str) -> None:
    """Return freed memory to the accelerator's driver, or to the system, for other processes."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc keeps what is freed
        trim(0)
