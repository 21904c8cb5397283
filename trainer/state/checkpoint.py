"""Checkpoints: all that a trainer needs to go on as if it had never stopped, on any number of ranks.

Owns `DIR/v000007`: `tensors/*.safetensors` (weights, moments and random number state, every rank its shards) and `state.json`
(version, parent, steps, probe, every, groups, dtype, lora). Format 1, of one process, is read too.
Invariants: a directory of that name is whole (it was written aside by all ranks, fsynced and renamed by the first, and is renamed
before it is removed) and never written again; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gateway.types import Probe
from gateway.weights import folders
from trainer.errors import CheckpointError
from trainer.model import parallel
from trainer.model.optim import Moments, Optimizer
from trainer.model.parallel import Ranks
from trainer.state.directory import Aside, sweep

FORMAT = 2
_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_WEIGHT, _MOMENT, _RNG = "weight/", "moment/", "rng"
_CUDA_RNG = "cuda_rng"
_ANNOUNCED = ".announced"
_WAY = "put it back, or begin a new run in another [run] dir"


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
    """Versions from one checkpoint to the next: up to `every` - 1 later ones may be published without a checkpoint."""
    groups: tuple[str, ...] | None = ()
    """The sorted ids of the groups that the last step was trained on; None in a checkpoint that was written without them."""
    dtype: str | None = None
    """`[model] dtype` of the run; None in a checkpoint of format 1, whose weights are of that precision."""
    adapters: Mapping[str, Any] | None = None
    """`[model.lora]` of the run, whose adapters alone are in the checkpoint; None if all weights are."""


def tensors_of(model: Any, optimizer: Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name: this rank's shards."""
    tensors = {_WEIGHT + name: tensor for name, tensor in parallel.weights(model).items()}
    return tensors | _flat(optimizer.moments()) | _random_state(ranks)


def save(directory: Path, said: CheckpointMeta, tensors: Mapping[str, Tensor], ranks: Ranks) -> Path:
    """Writes `directory/v<version>`. Collective.

    Raises VersionReused if there is one, CheckpointError if it cannot be written, and RankLost.
    """
    target = directory / folders.name_of(said.version)
    with _naming(target), ranks.within("checkpoint"):
        if not ranks.leads:
            parallel.write(ranks.from_first(), tensors, ranks)
            return target
        with Aside(target) as aside:
            parallel.write(ranks.from_first(aside / "tensors"), tensors, ranks)
            (aside / "state.json").write_text(json.dumps(_state_of(said)))
        for note in _announced(directory, 0, said.version):
            note.unlink()
    return target


def announce(directory: Path, version: int) -> None:
    """Notes that a checkpoint is going to be written while its version is published already. Raises CheckpointError."""
    note = directory / f".{folders.name_of(version)}{_ANNOUNCED}"
    with _naming(note):
        note.touch()
        folders.sync(directory)


def is_missing(directory: Path, since: int) -> bool:
    """True if a checkpoint after version `since` was announced, and never became whole; one that was removed did."""
    return bool(_announced(directory, since + 1))


def _announced(directory: Path, first: int, last: float = math.inf) -> list[Path]:
    """The notes of checkpoints that are not whole, of the versions from `first` to `last`."""
    notes = {
        note: folders.version_of(note.stem.removeprefix(".")) for note in directory.glob(f".*{_ANNOUNCED}")
    }
    return [note for note, version in notes.items() if version is not None and first <= version <= last]


def _state_of(said: CheckpointMeta) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": said.version,
        "parent": said.parent,
        "step": said.steps,
        "probe": said.probe.to_json() if said.probe else None,
        "every": said.every,
        "groups": said.groups,
        "dtype": said.dtype,
        "lora": said.adapters,
    }


def load(
    directory: Path,
    model: Any,
    optimizer: Optimizer,
    ranks: Ranks,
    dtype: str,
    adapters: Mapping[str, Any] | None = None,
) -> CheckpointMeta:
    """Puts a checkpoint's tensors into `model` and `optimizer`. Collective.

    Raises CheckpointError if they do not fit or are damaged, or are of another `[model] dtype` or `[model.lora]`.
    """
    with _naming(directory):
        state = json.loads((directory / "state.json").read_text())
        _check_adapters(directory, state.get("lora"), adapters)
        if state["format"] == 1:
            _load_first_format(directory, model, optimizer, dtype)
        elif state["format"] == FORMAT:
            _check_dtype(directory, state["dtype"], dtype)
            _load_tensors(directory, model, optimizer, ranks)
        else:
            raise CheckpointError(f"{directory}: format {state['format']}, this build reads 1 and {FORMAT}")
        return _said(state)


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Names the checkpoint of which a file cannot be written or read."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, parallel.StorageError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


def _load_tensors(directory: Path, model: Any, optimizer: Optimizer, ranks: Ranks) -> None:
    stored = parallel.stored(directory / "tensors")
    weights = parallel.weights(model)
    found = {
        name.removeprefix(_WEIGHT): shape for name, (shape, _) in stored.items() if name.startswith(_WEIGHT)
    }
    _check_shapes(directory, found, weights)
    moments: Moments = {
        name: entry
        for name, entry in optimizer.empty_moments().items()
        # Moments of another optimizer's kind are of no use; a weight that never had a gradient has none.
        if all(f"{_MOMENT}{name}/{key}" in stored for key in entry)
    }
    random = {name: tensor for name, tensor in _random_state(ranks).items() if name in stored}
    tensors = {_WEIGHT + name: weights[name] for name in found}
    parallel.read(directory / "tensors", {**tensors, **_flat(moments), **random}, ranks)
    optimizer.take_moments(moments)
    torch.set_rng_state(random[_RNG])
    if _CUDA_RNG in random:
        torch.cuda.set_rng_state(random[_CUDA_RNG])


def _flat(moments: Moments) -> dict[str, Tensor]:
    return {
        f"{_MOMENT}{name}/{key}": value for name, entry in moments.items() for key, value in entry.items()
    }


def _random_state(ranks: Ranks) -> dict[str, Tensor]:
    """The first rank's, for nothing in a step draws numbers of a rank's own."""
    found = {_RNG: torch.get_rng_state()}
    return found | {_CUDA_RNG: torch.cuda.get_rng_state()} if ranks.device.startswith("cuda") else found


def _load_first_format(directory: Path, model: Any, optimizer: Optimizer, dtype: str) -> None:
    """`model.safetensors` and `optimizer.pt`, whose moments have the numbers of the weights."""
    weights = parallel.weights(model)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        _check_shapes(directory, {name: torch.Size(s.get_shape()) for name, s in slices.items()}, weights)
        for stored in slices.values():
            if stored.get_dtype() in _FLOATS:
                _check_dtype(directory, _FLOATS[stored.get_dtype()], dtype)
        for name in slices:
            parallel.put(weights[name], file.get_tensor(name))
    tensors = torch.load(directory / "optimizer.pt", weights_only=True, map_location="cpu")
    moments, whole = optimizer.empty_moments(), tensors["optimizer"]["state"]
    for number, (name, _) in enumerate(model.named_parameters()):
        if not moments.get(name, {}).keys() <= whole.get(number, {}).keys():
            moments.pop(name)
            continue
        for key, target in moments.get(name, {}).items():
            parallel.put(target, whole[number][key])
    optimizer.take_moments(moments)
    torch.set_rng_state(tensors["rng"])


def _check_shapes(directory: Path, stored: Mapping[str, torch.Size], mine: Mapping[str, Tensor]) -> None:
    """Refuses settings whose model is not the one that was trained. Raises CheckpointError, which names the setting."""
    for name, shape in stored.items():
        if name not in mine or mine[name].shape != shape:
            said = list(mine[name].shape) if name in mine else "absent"
            raise CheckpointError(
                f"{directory} is of another model than [model] path: {name} has shape {list(shape)} in the checkpoint"
                f" and is {said} in the model; {_WAY}"
            )


def _check_dtype(directory: Path, trained: str, now: str) -> None:
    if trained != now:
        raise CheckpointError(f"{directory} was trained in {trained}, and [model] dtype is {now}; {_WAY}")


def _check_adapters(
    directory: Path, trained: Mapping[str, Any] | None, now: Mapping[str, Any] | None
) -> None:
    if trained is None or now is None:
        if trained is not now:
            one, other = ("without", "with") if trained is None else ("with", "without")
            raise CheckpointError(
                f"{directory} was trained {one} [model.lora], and now is {other} it; {_WAY}"
            )
        return
    for key, value in now.items():
        if trained.get(key) != value:
            raise CheckpointError(
                f"{directory} was trained with [model.lora] {key} = {trained.get(key)!r}, and now it is {value!r}; {_WAY}"
            )


def _said(state: dict[str, Any]) -> CheckpointMeta:
    version: int = state["version"]
    # A checkpoint without a parent was written when every version's parent was the one before.
    parent = state.get("parent", version - 1 if version else None)
    probe = Probe.from_json(state["probe"]) if state["probe"] else None
    groups = tuple(state["groups"]) if state.get("groups") is not None else None
    every, dtype = state.get("every", 1), state.get("dtype")
    return CheckpointMeta(version, parent, state["step"], probe, every, groups, dtype, state.get("lora"))


def newest(directory: Path) -> Path | None:
    """The checkpoint of the highest version, or None."""
    return next(reversed(folders.versions_in(directory).values()), None)


def prune(directory: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    sweep(directory)
    folders.prune(directory, keep)
