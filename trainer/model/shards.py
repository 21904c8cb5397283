"""The files of a checkpoint's tensors: every rank writes its shards as safetensors, and any number of ranks reads them.

A part of `parallel`: imports torch.distributed too. torch's planner decides which rank writes what, so that replicas are written
once; the bytes are written here, one tensor after another, and hashed with BLAKE3 on the way. Invariants: beyond the tensors
themselves, a write takes the host's memory for one tensor; nothing is ever pickled.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.model.parallel import Ranks, local

StorageError = dcp.CheckpointException
"""Raised on every rank if one of them cannot write or read its shards."""
_PIECE = 2**24
"""Bytes that are written, read and hashed in one piece."""
_THREADS = 4
"""Threads that hash."""
_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What safetensors calls each precision."""


@dataclass(frozen=True, slots=True)
class File:
    """One rank's file as it was written."""

    name: str
    size: int
    """Bytes."""
    blake3: str
    """The hash of all its bytes, hexadecimal."""


class HostCopy:
    """A copy of this rank's shards in the host's memory, which is kept for the next copy.

    Pageable: torch rounds what it pins up to a power of two, and the copy is as large as the state.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of `tensors`; it replaces the one before."""
        self._kept = {name: self._copied(name, tensor) for name, tensor in tensors.items()}
        return dict(self._kept)

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.pop(name, None)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            staged: Tensor = dcp.staging.BlockingAsyncStager().stage({name: tensor})[name]
            return staged
        local(kept).copy_(local(tensor))
        return kept


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of whole tensors, of which this rank may have shards."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write(directory: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> tuple[File, ...]:
    """Write tensors by name, every rank its shards; return all ranks' files on the first, and none on others. Collective.

    Raise StorageError.
    """
    writer = _Writer(directory)
    with _silence():
        dcp.save(
            dict(tensors), storage_writer=writer, process_group=ranks.object_group, no_dist=ranks.size == 1
        )
    return writer.files


def stored(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shapes and precisions of what `write` wrote, whole tensors by name. Raise OSError or SafetensorError."""
    entries = dcp.HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(directory: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Fill tensors with what `write` wrote of that name, by however many ranks. Collective. Raise StorageError."""
    reader = dcp.HuggingFaceStorageReader(str(directory))
    with _silence():
        dcp.load(
            dict(tensors), storage_reader=reader, process_group=ranks.object_group, no_dist=ranks.size == 1
        )


def damage(directory: Path, files: Sequence[File], ranks: Ranks) -> str:
    """Return what is wrong with the files that `write` returned, the same on every rank; empty if nothing. Collective.

    Every rank reads its share of them, whole.
    """
    own = (_damage(directory, file) for file in files[ranks.rank :: ranks.size])
    found = [each for each in ranks.all_gather(next(filter(None, own), "")) if each]
    names = {file.name for file in files}
    if not found and ranks.is_rank_zero:
        found = [
            f"{path.name} is not one of its files" for path in directory.iterdir() if path.name not in names
        ]
    return str(ranks.broadcast(found[0] if found else ""))


def _damage(directory: Path, file: File) -> str:
    try:
        size = (directory / file.name).stat().st_size
        if size != file.size:
            return f"{file.name} has {size} bytes instead of {file.size}"
        if _digest(directory / file.name) != file.blake3:
            return f"{file.name} has other bytes than were written (its BLAKE3 differs)"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return ""


def _digest(path: Path) -> str:
    hashed = blake3(max_threads=_THREADS)
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            hashed.update(piece)
    return hashed.hexdigest()


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes one file for each rank that has something to write, tensor by tensor: torch's own makes one object of all bytes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)
        self._directory = directory
        self.files: tuple[File, ...] = ()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan. Raise OSError."""
        result: Future[list[WriteResult]] = Future()
        if not plan.items:
            result.set_result([])
            return result
        path = self._directory / f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
        with path.open("xb") as file:
            written = _write(file, path.name, plan.items, planner)
        result.set_result([WriteResult(item.index, _bytes_of(item), written) for item in plan.items])
        return result

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Store the files of all ranks; called only on rank 0."""
        files = {each.storage_data.name: each.storage_data for part in results for each in part}
        self.files = tuple(files[name] for name in sorted(files))


def _write(file: BinaryIO, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> File:
    """Write a safetensors file as torch's reader of shards expects it: offsets of the shards are in its metadata."""
    # The widest numbers first, so that each tensor begins at a multiple of its numbers' size.
    ordered = sorted(items, key=lambda item: (-_width(item), item.index.fqn))
    hashed, size = blake3(max_threads=_THREADS), 0

    def put(data: Any) -> None:
        nonlocal size
        file.write(data)
        hashed.update(data)
        size += len(data)

    put(_header(ordered))
    for item in ordered:
        for piece in _pieces(cast(Tensor, planner.resolve_data(item))):
            put(piece)
    file.flush()
    os.fsync(file.fileno())
    return File(name, size, hashed.hexdigest())


def _header(items: Sequence[WriteItem]) -> bytes:
    """Return the length of the header in 8 bytes, and the header, which ends at a multiple of 8 bytes."""
    offsets = {item.index.fqn: {"saved_offsets": list(_chunk(item).offsets)} for item in items}
    entries: dict[str, Any] = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    }
    begin = 0
    for item in items:
        end = begin + _bytes_of(item)
        kind = _KINDS[_properties(item).dtype]
        entries[item.index.fqn] = {
            "dtype": kind,
            "shape": list(_chunk(item).sizes),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, copied to the host if they are elsewhere.

    Not by numpy: memory of which it had a view can no more be freed while the weights are offloaded.
    """
    data = tensor.detach().cpu().contiguous()
    view = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")
    for begin in range(0, data.nbytes, _PIECE):
        yield view[begin : begin + _PIECE]


def _chunk(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _properties(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data.properties


def _width(item: WriteItem) -> int:
    width: int = _properties(item).dtype.itemsize
    return width


def _bytes_of(item: WriteItem) -> int:
    return int(torch.Size(_chunk(item).sizes).numel()) * _width(item)


@contextmanager
def _silence() -> Iterator[None]:
    """Ignore torch's warning that a single rank may be a mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield
