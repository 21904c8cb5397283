"""The elements that changed from one version to the next, exactly: what travels in the place of whole tensors.

A step of reinforcement learning changes few bits of bfloat16 weights. Of each changed element a delta has its distance from the
one before and the difference of the two bit patterns, modulo their range, in byte planes that deflate well. Both are integers,
so that the parent plus the delta is the new version to the bit, which the hashes of the manifest confirm.

The file is an `.npz` without objects, with arrays named by file and tensor. Engines do not look at it.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.weights.tensors import (
    Malformed,
    Tensor,
    layout_of,
)

NAME = "delta.npz"
_FAR = 255
"""A distance from which it is stored separately, in four bytes."""
_UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, zlib.error)
Elements = npt.NDArray[Any]
"""Bit patterns, as unsigned integers of the elements' size."""


def write(target: Path, old: Path, new: Path) -> bool:
    """Write the delta from the version in folder `old` to that in `new`; return False, and write nothing, if there is none.

    There is none between versions whose tensors do not lie at the same places, or of types whose elements have no integer of
    their size. Reads every byte, so call it in a thread. Raise OSError.
    """
    arrays: dict[str, Elements] = {}
    files = sorted(new.glob("*.safetensors"))
    for file in files:
        if not _alike(old / file.name, file):
            return False
        for name, tensor, before, after in _pairs(old / file.name, file):
            changed = np.flatnonzero(before != after)
            if len(changed):
                arrays |= _encoded(f"{file.name}/{name}", changed, after[changed] - before[changed], tensor)
    with target.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    return bool(files)


def apply(delta: Path, folder: Path) -> None:
    """Change the safetensors files of a copy of the parent, in place, into those of the new version.

    The outcome is to be checked by the manifest's hashes. Raise Malformed for a delta that is not of these files.
    """
    try:
        with np.load(delta, allow_pickle=False) as arrays:
            files = {file.name for file in folder.glob("*.safetensors")}
            names = [name.removesuffix("/near") for name in arrays.files if name.endswith("/near")]
            for name in names:
                file, _, tensor = name.partition("/")
                if file not in files:
                    raise ValueError(f"there is no file {file!r}")
                _add(folder / file, tensor, *(arrays[f"{name}/{part}"] for part in ("near", "far", "steps")))
    except (*_UNREADABLE, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise Malformed(f"{delta} is not a delta of {folder}: {error}") from error


def _alike(old: Path, new: Path) -> bool:
    """Return true if the tensors of both files lie at the same places, and all have elements that can be compared."""
    if not old.is_file():
        return False
    try:
        before, after = layout_of(old), layout_of(new)
    except Malformed:
        return False
    return before == after and all(tensor.kind is not None for tensor in after[0].values())


def _pairs(old: Path, new: Path) -> Iterator[tuple[str, Tensor, Elements, Elements]]:
    tensors, begin = layout_of(new)
    for name, tensor in tensors.items():
        if tensor.end > tensor.start:
            yield name, tensor, _elements(old, tensor, begin, "r"), _elements(new, tensor, begin, "r")


def _elements(file: Path, tensor: Tensor, begin: int, mode: Any) -> Elements:
    kind = tensor.kind
    assert kind is not None
    count = (tensor.end - tensor.start) // np.dtype(kind).itemsize
    return np.memmap(file, kind, mode, begin + tensor.start, (count,))


def _encoded(
    name: str, changed: npt.NDArray[np.int64], steps: Elements, tensor: Tensor
) -> dict[str, Elements]:
    gaps = np.diff(changed, prepend=-1) - 1
    planes = np.ascontiguousarray(_zigzag(steps)).view(np.uint8).reshape(len(steps), -1).T
    return {
        f"{name}/near": np.minimum(gaps, _FAR).astype(np.uint8),
        f"{name}/far": gaps[gaps >= _FAR].astype(np.uint32),
        f"{name}/steps": np.ascontiguousarray(planes),
    }


def _add(file: Path, name: str, near: Elements, far: Elements, planes: Elements) -> None:
    tensors, begin = layout_of(file)
    tensor = tensors[name]
    if tensor.kind is None:
        raise ValueError(f"tensor {name!r} has elements of {tensor.dtype}")
    gaps = near.astype(np.int64)
    gaps[near == _FAR] = far
    places = np.cumsum(gaps + 1) - 1
    steps = _unzigzag(np.ascontiguousarray(planes.T).view(tensor.kind).reshape(-1))
    elements = _elements(file, tensor, begin, "r+")
    elements[places] += steps


def _zigzag(steps: Elements) -> Elements:
    """Small steps in either direction become small numbers."""
    top = steps.dtype.itemsize * 8 - 1
    return (steps << 1) ^ (0 - (steps >> top)).astype(steps.dtype)


def _unzigzag(numbers: Elements) -> Elements:
    return (numbers >> 1) ^ (0 - (numbers & 1)).astype(numbers.dtype)
