"""Writes the folder of a version (docs/topics/weights.md) from NumPy arrays or from a checkpoint. Owns no state."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from headgate.types import Probe
from headgate.weights.folders import AtomicDirectory, name_of
from headgate.weights.manifest import MANIFEST, TENSORS, write_manifest

State = Mapping[str, npt.NDArray[Any]]


def write_version(
    directory: Path,
    version: int,
    weights: State | Path,
    probe: Probe,
    parent: int,
    base: Path,
    unchanged: Sequence[str] = (),
) -> Path:
    """Write a version below `directory`, whole or not at all, and return its folder.

    `weights`: all tensors by their names in the checkpoint, or a folder that `save_pretrained` wrote; NumPy has no bfloat16, so
    such weights need a folder, or are written as float32. `base`: an earlier version, whose configuration and tokenizer the
    version has too, as engines were started with them. `unchanged`: tensors of `base` that the version leaves out.

    Raise TypeError for a value that is not an array, and OSError. A folder of the version's name is left alone, for another
    trainer may have written it: the new one gets a number more.
    """
    target = _free(directory / name_of(version))
    with AtomicDirectory(target) as temporary:
        _copy(base, temporary, tensors=False)
        if isinstance(weights, Path):
            _copy(weights, temporary, tensors=True)
        else:
            state = {name: _array(name, value) for name, value in weights.items()}
            save_file(state, temporary / "model.safetensors")
        write_manifest(temporary, version, parent, probe, unchanged)
    return target


def _free(wanted: Path) -> Path:
    names = (wanted, *(wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 1000)))
    return next(path for path in names if not path.exists())


def _copy(source: Path, target: Path, *, tensors: bool) -> None:
    """Copy the files of a checkpoint that are not in `target` yet."""
    for file in sorted(source.iterdir()):
        is_weight = TENSORS in file.name or file.name.startswith("pytorch_model")
        wanted = file.is_file() and file.name != MANIFEST and (tensors or not is_weight)
        if wanted and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"tensor {name!r} is a {type(value).__name__}: give NumPy arrays, such as `tensor.cpu().numpy()`"
        )
    return value if value.flags.c_contiguous else value.copy(order="C")
