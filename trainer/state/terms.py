"""What may not change between starts of a run: whether a checkpoint fits today's settings and model. Pure."""

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

_REMEDY = "change it back, or begin a new run in another [run] dir"


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings and the model of this start."""

    dtype: str
    """`[model] dtype`."""
    adapters: Mapping[str, Any] | None
    """`[model.lora]`, or None."""
    origin: Origin | None
    """The model of `[model] path`; None on other ranks than 0, which compares it."""
    depends: str = ""
    """What of this run is not in its checkpoints but read from `[model] path` at each start; empty if nothing."""


def check(directory: Path, meta: CheckpointMeta, terms: Terms) -> None:
    """Raise CheckpointError, which names the setting, if a checkpoint was made with others."""
    _check_adapters(directory, meta.adapters, terms.adapters)
    if meta.dtype != terms.dtype:
        raise CheckpointError(
            f"{directory} was trained in {meta.dtype}, and [model] dtype is {terms.dtype}; {_REMEDY}"
        )
    if meta.origin is None or terms.origin is None:
        return
    if changes := meta.origin.changes(terms.origin):
        raise CheckpointError(
            f"{directory} is of another model than [model] path: in config.json {changes}; {_REMEDY}"
        )
    if terms.depends and meta.origin.weights != terms.origin.weights:
        raise CheckpointError(
            f"{directory} began with other weights than those of [model] path, on which {terms.depends} depends; {_REMEDY}"
        )


def check_shapes(directory: Path, stored: Mapping[str, torch.Size], own: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, which names the setting, if a checkpoint's tensors are those of another model."""
    for name, shape in stored.items():
        if name not in own or own[name].shape != shape:
            now = list(own[name].shape) if name in own else "absent"
            raise CheckpointError(
                f"{directory} is of another model than [model] path: {name} has shape {list(shape)} in the checkpoint"
                f" and is {now} in the model; {_REMEDY}"
            )


def _check_adapters(
    directory: Path, trained: Mapping[str, Any] | None, now: Mapping[str, Any] | None
) -> None:
    if trained is None or now is None:
        if trained is not now:
            one, other = ("without", "with") if trained is None else ("with", "without")
            raise CheckpointError(
                f"{directory} was trained {one} [model.lora], and now is {other} it; {_REMEDY}"
            )
        return
    for key, value in now.items():
        if trained.get(key) != value:
            raise CheckpointError(
                f"{directory} was trained with [model.lora] {key} = {trained.get(key)!r}, and now it is {value!r}; {_REMEDY}"
            )
