"""What may not change between the lives of a run: whether a checkpoint is of the settings and the model of today. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.state.origin import Origin
from trainer.state.record import CheckpointMeta

_WAY = "put it back, or begin a new run in another [run] dir"


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings and the model of today."""

    dtype: str
    """`[model] dtype`."""
    adapters: Mapping[str, Any] | None
    """`[model.lora]`, or None."""
    origin: Origin | None
    """The model of `[model] path`; None on other ranks than the first, which alone compares it."""
    rests: str = ""
    """What of this run is not in its checkpoints and comes from `[model] path` at each start; empty if nothing."""


def check(directory: Path, meta: CheckpointMeta, terms: Terms) -> None:
    """Raise CheckpointError, which names the setting, if a checkpoint is of others."""
    _check_adapters(directory, meta.adapters, terms.adapters)
    if meta.dtype is not None:
        check_dtype(directory, meta.dtype, terms.dtype)
    if meta.origin is None or terms.origin is None:
        return
    if changes := meta.origin.changes(terms.origin):
        raise CheckpointError(
            f"{directory} is of another model than [model] path: in config.json {changes}; {_WAY}"
        )
    if terms.rests and meta.origin.weights != terms.origin.weights:
        raise CheckpointError(
            f"{directory} began with other weights than those of [model] path, on which {terms.rests} rests; {_WAY}"
        )


def check_shapes(directory: Path, stored: Mapping[str, torch.Size], mine: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, which names the setting, if a checkpoint's tensors are those of another model."""
    for name, shape in stored.items():
        if name not in mine or mine[name].shape != shape:
            now = list(mine[name].shape) if name in mine else "absent"
            raise CheckpointError(
                f"{directory} is of another model than [model] path: {name} has shape {list(shape)} in the checkpoint"
                f" and is {now} in the model; {_WAY}"
            )


def check_dtype(directory: Path, trained: str, now: str) -> None:
    """Raise CheckpointError if a checkpoint is of another `[model] dtype`."""
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
