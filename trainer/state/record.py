"""`state.json` of a checkpoint: what it is of, and the sizes and hashes of its other files.

Invariant of format 3: its own BLAKE3, over all other keys as canonical JSON, is in it. Formats 1 and 2, from before, have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from gateway.types import Probe
from trainer.errors import CheckpointDamaged
from trainer.model.shards import File
from trainer.state.origin import Origin

FORMAT = 3
_NAME, _OWN = "state.json", "blake3"


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """The metadata of a checkpoint, beyond its tensors."""

    version: int
    parent: int | None
    """The version that this one was made of; None for the initial weights."""
    steps: int
    """Optimizer steps since the initial weights. Fewer than the version once a run went back to an older checkpoint."""
    probe: Probe | None
    groups: tuple[str, ...] | None = ()
    """The sorted ids of the groups that the last step was trained on; None in a checkpoint that was written without them."""
    dtype: str | None = None
    """`[model] dtype` of the run; None in a checkpoint of format 1, whose weights are of that precision."""
    adapters: Mapping[str, Any] | None = None
    """`[model.lora]` of the run, whose adapters alone are in the checkpoint; None if all weights are."""
    origin: Origin | None = None
    """The model that the run began with; None in a checkpoint that was written without it."""


@dataclass(frozen=True, slots=True)
class Record:
    """All of a `state.json`."""

    format: int
    meta: CheckpointMeta
    files: tuple[File, ...] | None
    """The files of tensors; None in a checkpoint that was written without their hashes."""


def write(directory: Path, meta: CheckpointMeta, files: Sequence[File]) -> None:
    """Write the `state.json` of a checkpoint. Raise OSError."""
    state: dict[str, Any] = {
        "format": FORMAT,
        "version": meta.version,
        "parent": meta.parent,
        "step": meta.steps,
        "probe": meta.probe.to_json() if meta.probe else None,
        "groups": meta.groups,
        "dtype": meta.dtype,
        "lora": meta.adapters,
        "origin": asdict(meta.origin) if meta.origin else None,
        "files": [asdict(file) for file in files],
    }
    (directory / _NAME).write_text(json.dumps(state | {_OWN: _digest(state)}))


def read(directory: Path) -> Record:
    """Return what `write` wrote. Raise CheckpointDamaged if it did not, or OSError."""
    if not (directory / _NAME).is_file():
        raise CheckpointDamaged(f"{directory} is damaged: {_NAME} is missing")
    try:
        state = json.loads((directory / _NAME).read_bytes())
        own = state.pop(_OWN, None)
        if (own is not None or state["format"] >= FORMAT) and own != _digest(state):
            raise CheckpointDamaged(
                f"{directory} is damaged: {_NAME} has other bytes than were written (its BLAKE3 differs)"
            )
        return _record(state)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{directory} is damaged: {_NAME} does not describe a checkpoint") from error


def _digest(state: Mapping[str, Any]) -> str:
    return blake3(json.dumps(state, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _record(state: dict[str, Any]) -> Record:
    version = int(state["version"])
    # A checkpoint without a parent was written when every version's parent was the one before.
    parent = state.get("parent", version - 1 if version else None)
    meta = CheckpointMeta(
        version,
        None if parent is None else int(parent),
        int(state["step"]),
        Probe.from_json(state["probe"]) if state["probe"] else None,
        tuple(state["groups"]) if state.get("groups") is not None else None,
        state.get("dtype"),
        state.get("lora"),
        Origin(**state["origin"]) if state.get("origin") else None,
    )
    files = state.get("files")
    return Record(
        int(state["format"]), meta, None if files is None else tuple(File(**each) for each in files)
    )
