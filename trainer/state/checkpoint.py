"""Checkpoints: all that a trainer needs to go on as if it had never stopped.

Owns `DIR/v000007`: `model.safetensors`, `optimizer.pt` (optimizer and random number states), `state.json` (version, parent,
steps, probe, every, groups).
Invariants: a directory of that name is whole (it was written aside, fsynced and renamed, and is renamed before it is removed) and
never written again; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model

from gateway.types import Probe
from trainer.errors import CheckpointError
from trainer.state.directory import Aside, remove, sweep

FORMAT = 1
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_NAME = re.compile(r"v(\d{6,})")


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """The metadata of a checkpoint, beside its tensors."""

    version: int
    parent: int | None
    """The version that this one was made of; None for the initial weights."""
    steps: int
    """Optimizer steps since the initial weights. Fewer than the version once a run went back to an older checkpoint."""
    probe: Probe | None
    every: int = 1
    """Fewer versions than this can have been published after it without a checkpoint of their own."""
    groups: tuple[str, ...] | None = ()
    """The sorted ids of the groups that the last step was trained on; None in a checkpoint that was written without them."""


def save(directory: Path, said: CheckpointMeta, model: Any, optimizer: torch.optim.Optimizer) -> Path:
    """Writes `directory/v<version>`. Raises VersionReused if there is one."""
    target = directory / name_of(said.version)
    with Aside(target) as aside:
        save_model(model, str(aside / "model.safetensors"))
        tensors = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors["cuda_rng"] = torch.cuda.get_rng_state_all()
        torch.save(tensors, aside / "optimizer.pt")
        state = {
            "format": FORMAT,
            "version": said.version,
            "parent": said.parent,
            "step": said.steps,
            "probe": said.probe.to_json() if said.probe else None,
            "every": said.every,
            "groups": said.groups,
        }
        (aside / "state.json").write_text(json.dumps(state))
    return target


def load(directory: Path, model: Any, optimizer: torch.optim.Optimizer) -> CheckpointMeta:
    """Puts a checkpoint's tensors into `model` and `optimizer`. Raises CheckpointError if they do not fit or are damaged."""
    try:
        state = json.loads((directory / "state.json").read_text())
        if state["format"] != FORMAT:
            raise CheckpointError(f"{directory}: format {state['format']}, this build reads {FORMAT}")
        _check_model(directory, model)
        device = str(next(model.parameters()).device)
        load_model(model, str(directory / "model.safetensors"), device=device)
        tensors = torch.load(directory / "optimizer.pt", weights_only=True, map_location="cpu")
        optimizer.load_state_dict(tensors["optimizer"])
        torch.set_rng_state(tensors["rng"])
        if "cuda_rng" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(tensors["cuda_rng"])
        return _said(state)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


def _check_model(directory: Path, model: Any) -> None:
    """Refuses settings whose model is not the one that was trained. Raises CheckpointError, which names the setting."""
    way = "put it back, or begin a new run in another [run] dir"
    mine = model.state_dict()
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            stored = file.get_slice(name)
            if name not in mine or list(mine[name].shape) != stored.get_shape():
                said = list(mine[name].shape) if name in mine else "absent"
                raise CheckpointError(
                    f"{directory} is of another model than [model] path: {name} has shape {stored.get_shape()} in the checkpoint"
                    f" and is {said} in the model; {way}"
                )
            trained, now = _FLOATS.get(stored.get_dtype()), mine[name].dtype
            if trained is not None and trained != now:
                raise CheckpointError(
                    f"{directory} was trained in {trained}, and [model] dtype makes {name} {now}; {way}"
                )


def _said(state: dict[str, Any]) -> CheckpointMeta:
    version: int = state["version"]
    # A checkpoint without a parent was written when every version's parent was the one before.
    parent = state.get("parent", version - 1 if version else None)
    probe = Probe.from_json(state["probe"]) if state["probe"] else None
    groups = tuple(state["groups"]) if state.get("groups") is not None else None
    return CheckpointMeta(version, parent, state["step"], probe, state.get("every", 1), groups)


def newest(directory: Path) -> Path | None:
    """The checkpoint of the highest version, or None."""
    return max(_all(directory), key=version_of, default=None)


def prune(directory: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    sweep(directory)
    for old in sorted(_all(directory), key=version_of)[:-keep]:
        remove(old)


def name_of(version: int) -> str:
    """The directory's name."""
    return f"v{version:06d}"


def version_of(directory: Path) -> int:
    """The version that a directory's name names."""
    match = _NAME.fullmatch(directory.name)
    if match is None:
        raise ValueError(f"{directory} is not named as a version")
    return int(match[1])


def _all(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [d for d in directory.iterdir() if _NAME.fullmatch(d.name) and d.is_dir()]
