"""Checkpoints of format 1, of one process, whose moments have the numbers of the weights: they are read and not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer.model import parallel
from trainer.model.optim import Optimizer
from trainer.state import terms

_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def load(directory: Path, model: Any, optimizer: Optimizer, dtype: str) -> None:
    """Put `model.safetensors` and `optimizer.pt` into `model` and `optimizer`. Raise CheckpointError if they do not fit."""
    weights = parallel.weights(model)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        shapes = {name: torch.Size(each.get_shape()) for name, each in slices.items()}
        terms.check_shapes(directory, shapes, weights)
        for stored in slices.values():
            if stored.get_dtype() in _FLOATS:
                terms.check_dtype(directory, _FLOATS[stored.get_dtype()], dtype)
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
