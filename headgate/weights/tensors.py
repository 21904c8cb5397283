"""Reads safetensors files: names, shapes and types of tensors, whether all numbers are finite, and whether two checkpoints have
the same tensors.

Numbers are tested as bits (not finite: all exponent bits are one), so types that numpy lacks, such as bfloat16, need no library.
A file is read once, for this and for the hashes of its tensors, by several threads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
from blake3 import blake3

INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
PIECE = 2**24
"""The bytes that one hash covers; the last piece of a tensor is shorter."""
_LOOK = 2**20
"""The bytes that are tested in one piece, so that the masked copies stay in the processor's cache."""
_THREADS = 4
_LONGEST_HEADER = 100_000_000
"""The longest header in bytes, as in the safetensors library."""
_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""The bytes of one number of each kind. Numbers of other kinds are not checked."""
_EXPONENT = {
    "F64": 0x7FF0_0000_0000_0000,
    "F32": 0x7F80_0000,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,  # F8_E4M3 has no infinity; only NaN has these bits
}
_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Kinds that may stand for one another: engines convert each of them into the kind that they compute with."""
_HEAD = "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"
"""A buffer that old checkpoints have, and that no engine loads."""
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Malformed(ValueError):
    """A file that should be a safetensors file is none."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor in a file."""

    dtype: str
    """The kind of numbers, as safetensors names it, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """The place where its bytes begin, counted from the end of the header."""
    end: int

    @property
    def kind(self) -> type[np.unsignedinteger[Any]] | None:
        """The unsigned integer of the size of its elements; None for kinds that are not known."""
        return _UNSIGNED.get(_BYTES.get(self.dtype, 0))


@dataclass(frozen=True, slots=True)
class Scan:
    """The findings of one pass over a file."""

    tensors: dict[str, Tensor]
    begin: int = 0
    """The bytes before the tensors, which hold their names, shapes and positions."""
    header: str = ""
    """The BLAKE3 of those bytes."""
    digests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The BLAKE3 (hexadecimal) of each `PIECE` of a tensor's bytes, by its name."""
    not_finite: tuple[str, ...] = ()
    """Tensors with a NaN or an infinity."""
    malformed: str = ""
    """The reason why the file is not a safetensors file; it has no tensors then."""


def scan(path: Path) -> Scan:
    """Read every tensor of a file, in several threads; blocks, so call it in a thread. Raise OSError."""
    with path.open("rb") as file:
        try:
            tensors, begin = _header(file)
        except Malformed as error:
            return Scan({}, malformed=str(error))
        header = blake3(os.pread(file.fileno(), begin, 0)).hexdigest()
        pieces = [
            (name, begin + at, min(PIECE, tensor.end - at), tensor.dtype)
            for name, tensor in tensors.items()
            for at in range(tensor.start, tensor.end, PIECE)
        ]
        with ThreadPoolExecutor(_THREADS, "weights") as threads:
            looks = list(threads.map(lambda piece: _look(file.fileno(), *piece[1:]), pieces))
    digests: dict[str, list[str]] = {name: [] for name in tensors}
    bad: dict[str, None] = {}
    for (name, *_), (digest, finite) in zip(pieces, looks, strict=True):
        digests[name].append(digest)
        if not finite:
            bad[name] = None
    return Scan(tensors, begin, header, {name: tuple(found) for name, found in digests.items()}, tuple(bad))


def _look(descriptor: int, at: int, size: int, dtype: str) -> tuple[str, bool]:
    """Return the hash of a piece of a tensor, and whether all of its numbers are finite. Both leave Python's lock."""
    data = os.pread(descriptor, size, at)
    if len(data) < size:
        raise OSError(f"the file ends {size - len(data)} bytes too early")
    return blake3(data).hexdigest(), _finite(data, dtype)


def _finite(data: bytes, dtype: str) -> bool:
    exponent = _EXPONENT.get(dtype)
    if exponent is None:
        return True
    kind = _UNSIGNED[_BYTES[dtype]]
    bits, step = np.frombuffer(data, kind), _LOOK // _BYTES[dtype]
    return all(int((bits[i : i + step] & kind(exponent)).max()) < exponent for i in range(0, len(bits), step))


def layout_of(path: Path) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a safetensors file, in the order of their bytes, and where those begin. Raise Malformed and
    OSError."""
    with path.open("rb") as file:
        return _header(file)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face checkpoint, in one file or several; none if the checkpoint has another format.

    Raise Malformed, with the file, and OSError.
    """
    index = folder / INDEX
    files: Iterable[Path] = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        files = [folder / name for name in sorted(set(weight_map(index).values()))]
    elif (folder / _WHOLE).is_file():
        files = [folder / _WHOLE]
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                found |= _header(file)[0]
        except Malformed as error:
            raise Malformed(f"{path}: {error}") from error
    return found


def misfit(
    base: Mapping[str, Tensor], found: Mapping[str, Tensor], unchanged: Collection[str], *, tied: bool
) -> str:
    """Describe the first tensor that does not fit and count the others; empty if all fit.

    `unchanged`: tensors that the version may leave out. `tied`: the output head is the embedding, and may be stored or not.
    """
    wrong = list(_misfits(base, found, unchanged, tied))
    others = f" (and {len(wrong) - 1} other tensors do not fit)" if len(wrong) > 1 else ""
    return f"{wrong[0]}{others}" if wrong else ""


def _misfits(
    base: Mapping[str, Tensor], found: Mapping[str, Tensor], unchanged: Collection[str], tied: bool
) -> Iterator[str]:
    for name, tensor in found.items():
        if name not in base:
            if not (tied and name.endswith(_HEAD)):
                yield f"tensor {name!r} is not one of the first version's checkpoint"
            continue
        expected = base[name]
        if tensor.shape != expected.shape:
            yield f"tensor {name!r} has the shape {list(tensor.shape)}, the first version's has {list(expected.shape)}"
        elif tensor.dtype != expected.dtype and not {tensor.dtype, expected.dtype} <= _FLOATS:
            yield f"tensor {name!r} is of {tensor.dtype}, the first version's of {expected.dtype}"
    for name in sorted(base.keys() - found.keys() - set(unchanged)):
        if not (tied and name.endswith(_HEAD)) and not name.endswith(_COMPUTED):
            yield f"tensor {name!r} is missing, and the manifest does not name it in `unchanged`"


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint in several files. Raise Malformed."""
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Malformed(f"{index} has no weight_map") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise Malformed(f"{index}: its weight_map is not of names and files")
    return found


def _header(file: BufferedReader) -> tuple[dict[str, Tensor], int]:
    """Read the tensors of a file, in the order of their bytes, and where those begin."""
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise Malformed("it is not a safetensors file")
    try:
        header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed(f"its safetensors header cannot be read: {error}") from error
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    end = 0
    for name, tensor in ordered.items():
        if tensor.start != end:
            raise Malformed(f"the bytes of tensor {name!r} do not follow those of the one before")
        end = tensor.end
    if 8 + length + end != size:
        raise Malformed(f"it has {size} bytes, its header requires {8 + length + end}")
    return ordered, 8 + length


def _tensor(name: str, entry: dict[str, object]) -> Tensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
        raise Malformed(f"tensor {name!r} has no type, shape or place")
    start, end = cast(list[int], offsets)
    tensor = Tensor(dtype, tuple(cast(list[int], shape)), start, end)
    if dtype in _BYTES and math.prod(tensor.shape) * _BYTES[dtype] != end - start:
        raise Malformed(f"tensor {name!r} has {end - start} bytes, which are not its shape's")
    if end < start:
        raise Malformed(f"tensor {name!r} ends before it begins")
    return tensor
