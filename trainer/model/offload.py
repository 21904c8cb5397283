"""Tensors of a rank that leave its device for a while, so that another process has the memory, and come back to the bit.

Whole storages leave, and not tensors: shards, views and ties stay what they are, and whoever holds a tensor holds it afterwards.
While they are away they have no memory at all, and nothing may touch them (`Learner.policy` sees to that).
Invariants: no memory is freed before every rank has all of its bytes in their other place; what is on disk is in a file without
a name, which is gone with the process however it ends, and is read by nobody but this process.
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


class Place(Protocol):
    """Bytes in the order in which they were written."""

    def write(self, data: Tensor) -> None:
        """Takes a storage's bytes."""

    def read(self, data: Tensor) -> None:
        """Gives them back, in the same order."""

    def rewind(self) -> None:
        """Whatever was written is there, and reading begins."""

    def clear(self) -> None:
        """Forgets the bytes."""


class Offload:
    """The tensors of one rank that are away, or none."""

    def __init__(self, where: Where, ranks: Ranks, directory: Path) -> None:
        """`directory`: where `disk` has its file."""
        self._ranks = ranks
        self._host_too = where == "disk" or not ranks.device.startswith("cuda")
        self._place: Place = Disk(directory, ranks.device) if where == "disk" else Host(ranks.device)
        self._away: list[tuple[UntypedStorage, int]] = []

    def out(self, tensors: Iterable[Tensor]) -> None:
        """Copies what tensors hold to their other place, and frees it. Collective.

        Raises OffloadFailed on every rank if one of them cannot; the tensors are then as they were.
        """
        leaving = list(self._storages(tensors))
        self._agree("leave", lambda: self._copy(leaving))
        self._away = [(storage, storage.nbytes()) for storage in leaving]
        for storage in leaving:
            storage.resize_(0)
        give_back(self._ranks.device)

    def back(self) -> None:
        """Fills the tensors again. Collective. Raises OffloadFailed, and what they hold is then undefined."""
        self._agree("come back", self._fill)
        self._place.clear()
        self._away = []

    def _copy(self, leaving: list[UntypedStorage]) -> None:
        for storage in leaving:
            self._place.write(_bytes(storage))
        self._place.rewind()
        _wait(self._ranks.device)

    def _fill(self) -> None:
        for storage, size in self._away:
            storage.resize_(size)
            self._place.read(_bytes(storage))
        _wait(self._ranks.device)

    def _agree(self, what: str, work: Callable[[], None]) -> None:
        """Does this rank's part, and raises on every rank if one of them failed."""
        why = ""
        try:
            work()
        except (OSError, RuntimeError) as error:  # the disk or the memory is full
            why = f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
        if whys := [each for each in self._ranks.of_all(why) if each]:
            raise OffloadFailed(
                f"weights and moments cannot {what} ([gateway] offload): {'; '.join(whys)}; make room there, or choose another"
                " place; the next start goes on from the newest checkpoint"
            )

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
        """Each storage once, if it has bytes and is in memory that is to be freed."""
        seen: set[int] = set()
        for tensor in tensors:
            local = parallel.local(tensor)
            storage = local.untyped_storage()
            wanted = storage.nbytes() and (self._host_too or local.is_cuda)
            if wanted and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


class Host:
    """The host's memory: pinned for an accelerator, and then kept for the next time, since pinning is slow."""

    def __init__(self, device: str) -> None:
        self._pinned = device.startswith("cuda")
        self._slabs: list[Tensor] = []
        self._at = 0

    def write(self, data: Tensor) -> None:
        """Copies do not wait for one another."""
        for mine, theirs in self._parts(data):
            mine.copy_(theirs, non_blocking=True)

    def read(self, data: Tensor) -> None:
        """Likewise."""
        for mine, theirs in self._parts(data):
            theirs.copy_(mine, non_blocking=True)

    def rewind(self) -> None:
        """Reading begins."""
        self._at = 0

    def clear(self) -> None:
        """Forgets the bytes."""
        self._at = 0
        if not self._pinned:
            self._slabs = []

    def _parts(self, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the slabs, from where it is, and the pieces of `data` that belong to them."""
        done = 0
        while done < len(data):
            slab, start = divmod(self._at, SLAB)
            if slab == len(self._slabs):
                self._slabs.append(torch.empty(SLAB, dtype=torch.uint8, pin_memory=self._pinned))
            size = min(SLAB - start, len(data) - done)
            yield self._slabs[slab][start : start + size], data[done : done + size]
            self._at, done = self._at + size, done + size


class Disk:
    """A file without a name in a folder; bytes pass through one slab of the host's memory."""

    def __init__(self, directory: Path, device: str) -> None:
        self._directory = directory
        self._pinned = device.startswith("cuda")
        self._file: IO[bytes] | None = None
        self._slab: Tensor | None = None

    def write(self, data: Tensor) -> None:
        """Writes all of it."""
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 (until `clear`)
        for part in data.split(SLAB):
            slab = self._through(len(part)).copy_(part)
            left = memoryview(slab.numpy().data)
            while left:
                left = left[self._file.write(left) :]

    def read(self, data: Tensor) -> None:
        """Raises OSError if bytes are missing."""
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
        """Reading begins."""
        if self._file is not None:
            self._file.seek(0)
        self._slab = None

    def clear(self) -> None:
        """Removes the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._slab = None, None

    def _through(self, size: int) -> Tensor:
        if self._slab is None:
            self._slab = torch.empty(SLAB, dtype=torch.uint8, pin_memory=self._pinned)
        return self._slab[:size]


def _bytes(storage: UntypedStorage) -> Tensor:
    """All of a storage, as a vector of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def give_back(device: str) -> None:
    """Returns freed memory to the accelerator's driver, or to the system, where other processes find it."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc keeps what is freed
        trim(0)
