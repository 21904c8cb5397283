"""Checkpoints: all that a trainer needs to continue as if it had never stopped, on any number of ranks.

Owns `DIR/v000007`: `tensors/*.safetensors` (weights, moments and random number state, every rank its shards) and `state.json`
(`record`: its metadata, and the hashes of those files).
Invariants: a directory of that name is whole (all ranks wrote it under another name, rank 0 synced and renamed it, and it is
renamed before it is removed) and never written again; the newest whole one is noted, so that its removal is noticed; every byte
is compared with its hash before any is used; nothing is ever unpickled.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headgate.weights import folders
from trainer.errors import CheckpointDamaged, CheckpointError
from trainer.model import parallel, shards
from trainer.model.optim import Moments, Optimizer
from trainer.model.parallel import Ranks
from trainer.state import faults, record, terms
from trainer.state.record import CheckpointMeta, Record
from trainer.state.terms import Terms

__all__ = [
    "CheckpointMeta",
    "Terms",
    "load",
    "newest_first",
    "prune",
    "rename_damaged",
    "save",
    "tensors_of",
    "was_removed",
]

_WEIGHT, _MOMENT, _RNG = "weight/", "moment/", "rng"
_CUDA_RNG = "cuda_rng"
_NOTE = re.compile(r"\.(v\d{6,})\.whole")
DAMAGED = ".damaged"
"""The suffix of a damaged checkpoint without which a run continued."""


def tensors_of(model: Any, optimizer: Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name: this rank's shards."""
    tensors = {_WEIGHT + name: tensor for name, tensor in parallel.weights(model).items()}
    return tensors | _flat(optimizer.moments()) | _random_state(ranks)


def save(directory: Path, meta: CheckpointMeta, tensors: Mapping[str, Tensor], ranks: Ranks) -> Path:
    """Write `directory/v<version>`, whole or not at all. Collective.

    Raise CheckpointError if it cannot be written or exists, and RankLost.
    """
    target, needed = directory / folders.name_of(meta.version), shards.size_of(tensors)
    with faults.writing(target, needed), ranks.within("checkpoint"), ExitStack() as stack:
        if not ranks.is_rank_zero:
            if isinstance(begun := ranks.broadcast(), str):
                raise CheckpointError(begun)
            shards.write(begun, tensors, ranks)
            return target
        temporary = stack.enter_context(_begun(target, needed, ranks))
        record.write(temporary, meta, shards.write(ranks.broadcast(temporary / "tensors"), tensors, ranks))
    _note(target)
    return target


@contextmanager
def _begun(target: Path, needed: int, ranks: Ranks) -> Iterator[Path]:
    """Yield a directory to fill as rank 0; if it cannot be made, send the reason to the other ranks."""
    with ExitStack() as stack:
        try:
            faults.check_space(target, needed)
            temporary = stack.enter_context(folders.AtomicDirectory(target))
        except OSError as error:
            ranks.broadcast(faults.unwritable(target, error, needed))
            raise
        yield temporary


def _note(target: Path) -> None:
    """Note that a checkpoint is the newest whole one, and remove the previous note. Raise CheckpointError."""
    note = target.with_name(f".{target.name}.whole")
    with faults.writing(note):
        note.touch()
        for other in _notes(target.parent):
            if other != note:
                other.unlink()
        folders.sync(target.parent)


def _notes(directory: Path) -> list[Path]:
    return [path for path in directory.glob(".*.whole") if _NOTE.fullmatch(path.name)]


def was_removed(directory: Path, since: int) -> bool:
    """Return whether a checkpoint of a version after `since` was whole, and has been removed."""
    noted = (folders.version_of(path.name[1:].removesuffix(".whole")) for path in _notes(directory))
    return any(version is not None and version > since for version in noted)


def load(directory: Path, model: Any, optimizer: Optimizer, ranks: Ranks, wanted: Terms) -> CheckpointMeta:
    """Put a checkpoint's tensors into `model` and `optimizer`. Collective.

    Raise CheckpointDamaged, the same on every rank, if not all of its bytes are those that were written, and CheckpointError if
    it is of other settings or another model, or cannot be read.
    """
    found = _checked(directory, ranks, wanted)
    with faults.reading(directory, whole=True), ranks.within("checkpoint"):
        _load_tensors(directory, model, optimizer, ranks)
    return found.meta


def _checked(directory: Path, ranks: Ranks, wanted: Terms) -> Record:
    """Return the record that rank 0 reads, once it fits and its files have their hashes. Collective."""
    found: Record | CheckpointError | None = None
    if ranks.is_rank_zero:
        try:
            with faults.reading(directory):
                found = record.read(directory)
            terms.check(directory, found.meta, wanted)
        except CheckpointError as error:
            found = error
    found = ranks.broadcast(found)
    if isinstance(found, CheckpointError):
        raise found
    assert found is not None
    if why := shards.damage(directory / "tensors", found.files, ranks):
        raise CheckpointDamaged(f"{directory} is damaged: {why}")
    return found


def _load_tensors(directory: Path, model: Any, optimizer: Optimizer, ranks: Ranks) -> None:
    stored = shards.stored(directory / "tensors")
    weights = parallel.weights(model)
    found = {
        name.removeprefix(_WEIGHT): shape for name, (shape, _) in stored.items() if name.startswith(_WEIGHT)
    }
    terms.check_shapes(directory, found, weights)
    if missing := weights.keys() - found.keys():
        raise CheckpointDamaged(f"{directory} is damaged: it has no {min(missing)}")
    moments: Moments = {
        name: entry
        for name, entry in optimizer.empty_moments().items()
        # Moments of another kind of optimizer are not used; a weight that never had a gradient has none.
        if all(f"{_MOMENT}{name}/{key}" in stored for key in entry)
    }
    random = {name: tensor for name, tensor in _random_state(ranks).items() if name in stored}
    tensors = {_WEIGHT + name: weights[name] for name in found}
    shards.read(directory / "tensors", {**tensors, **_flat(moments), **random}, ranks)
    optimizer.set_moments(moments)
    torch.set_rng_state(random[_RNG])
    if _CUDA_RNG in random:
        torch.cuda.set_rng_state(random[_CUDA_RNG])


def _flat(moments: Moments) -> dict[str, Tensor]:
    return {
        f"{_MOMENT}{name}/{key}": value for name, entry in moments.items() for key, value in entry.items()
    }


def _random_state(ranks: Ranks) -> dict[str, Tensor]:
    """Return the random state of rank 0, because no step draws other numbers on another rank."""
    found = {_RNG: torch.get_rng_state()}
    return found | {_CUDA_RNG: torch.cuda.get_rng_state()} if ranks.device.startswith("cuda") else found


def newest_first(directory: Path) -> list[Path]:
    """Return the checkpoints, that of the highest version first. Raise CheckpointError if `directory` cannot be read."""
    with faults.reading(directory):
        return [*reversed(folders.versions_in(directory).values())]


def rename_damaged(damaged: Path) -> Path:
    """Rename a damaged checkpoint, so that its version has none; return the new path. Raise CheckpointError."""
    target = damaged.with_name(damaged.name + DAMAGED)
    with faults.writing(target):
        if target.exists():
            shutil.rmtree(target)
        damaged.rename(target)
        for note in _notes(damaged.parent):
            note.unlink()
    return target


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; one may be written in the meantime. Raise CheckpointError."""
    with faults.writing(directory):
        folders.sweep(directory)
        folders.prune(directory, keep)
