"""`state.json` of a checkpoint: its metadata, and the sizes and hashes of its other files.

Invariant: its own BLAKE3, over all other keys as canonical JSON, is in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from headgate.types import Probe
from trainer.errors import CheckpointDamaged, CheckpointError
from trainer.model.shards import File
from trainer.state.origin import Origin

FORMAT = 4
_NAME, _OWN = "state.json", "blake3"


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """The metadata of a checkpoint, beyond its tensors."""

    version: int
    parent: int | None
    """The version from which this one was made; None for the initial weights."""
    steps: int
    """Optimizer steps since the initial weights. Fewer than the version once a run went back to an older checkpoint."""
    probe: Probe | None
    groups: tuple[str, ...]
    """The sorted ids of the groups that the last step was trained on."""
    algorithm_state: Mapping[str, float]
    """What the algorithm remembers of earlier steps."""
    dtype: str
    """`[model] dtype` of the run."""
    adapters: Mapping[str, Any] | None
    """`[model.lora]` of the run, if the checkpoint has only its adapters; None if it has all weights."""
    origin: Origin | None
    """The model that the run began with; None on other ranks than 0."""


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of a `state.json`."""

    meta: CheckpointMeta
    files: tuple[File, ...]
    """The files of tensors, with their hashes."""


def write(directory: Path, meta: CheckpointMeta, files: Sequence[File]) -> None:
    """Write the `state.json` of a checkpoint. Raise OSError."""
    state: dict[str, Any] = {
        "format": FORMAT,
        "version": meta.version,
        "parent": meta.parent,
        "step": meta.steps,
        "probe": meta.probe.to_json() if meta.probe else None,
        "groups": meta.groups,
        "algorithm_state": dict(meta.algorithm_state),
        "dtype": meta.dtype,
        "lora": meta.adapters,
        "origin": asdict(meta.origin) if meta.origin else None,
        "files": [asdict(file) for file in files],
    }
    (directory / _NAME).write_text(json.dumps(state | {_OWN: _digest(state)}))


def read(directory: Path) -> Record:
    """Return what `write` wrote. Raise CheckpointDamaged, CheckpointError for another format, or OSError."""
    if not (directory / _NAME).is_file():
        raise CheckpointDamaged(f"{directory} is damaged: {_NAME} is missing")
    try:
        state = json.loads((directory / _NAME).read_bytes())
        if int(state["format"]) != FORMAT:
            raise CheckpointError(f"{directory}: format {state['format']}, this build reads {FORMAT}")
        if state.pop(_OWN, None) != _digest(state):
            raise CheckpointDamaged(
                f"{directory} is damaged: {_NAME} has other bytes than were written (its BLAKE3 differs)"
            )
        return _record(state)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{directory} is damaged: {_NAME} does not describe a checkpoint") from error


def _digest(state: Mapping[str, Any]) -> str:
    return blake3(json.dumps(state, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _record(state: dict[str, Any]) -> Record:
    meta = CheckpointMeta(
        version=int(state["version"]),
        parent=None if state["parent"] is None else int(state["parent"]),
        steps=int(state["step"]),
        probe=Probe.from_json(state["probe"]) if state["probe"] else None,
        groups=tuple(state["groups"]),
        algorithm_state={str(name): float(value) for name, value in state["algorithm_state"].items()},
        dtype=str(state["dtype"]),
        adapters=state["lora"],
        origin=Origin(**state["origin"]) if state["origin"] else None,
    )
    return Record(meta, tuple(File(**each) for each in state["files"]))
