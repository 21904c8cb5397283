"""float32 masters with bf16 compute: the gradient is the CPU's in float32 except for rounding, and small steps change weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.gpu.batches import State, distance, learn, settings_of, state_of, tiny_model
from bench.gpu.checks.place import CheckFailed, Figures, Place
from trainer.rank_trainer import RankTrainer

BF16, TF32 = 0.03, 2e-3
"""The norm of the difference over the norm. A bf16 number is off by up to 0.4 %, and each layer adds to it."""
COMPUTED = 1e-5
"""Below it nothing was computed in bf16."""
CHANGED = 0.9
"""The share of the weights that a step of lr 1e-6 changes at least."""


def measure(place: Place) -> Figures:
    """Return both distances from the CPU's gradient, and the share of weights that a small step changes."""
    model = tiny_model(place.folder / "model")
    expected = first_gradient(model, place.folder / "expected", "cpu", "float32")
    figures: Figures = {
        f"{dtype}_distance": distance(
            first_gradient(model, place.folder / dtype, place.device, dtype), expected
        )
        for dtype in ("bfloat16", "float32")
    }
    figures["changed"] = changed_share(model, place.folder / "small", place.device)
    wrong = [
        why
        for holds, why in (
            (COMPUTED < figures["bfloat16_distance"] < BF16, "the gradient in bf16"),
            (figures["float32_distance"] < TF32, "the gradient in float32"),
            (figures["changed"] > CHANGED, "weights that a small step leaves unchanged"),
        )
        if not holds
    ]
    if wrong:
        raise CheckFailed("; ".join(wrong), figures)
    return figures


def first_gradient(model: Path, folder: Path, device: str, dtype: str) -> State:
    """Return the clipped gradient of one step."""
    seen: list[State] = []

    def look(trainer: RankTrainer) -> None:
        seen.append(state_of(trainer, lambda weight: weight.grad))

    learn(settings_of(model, folder, device, model={"dtype": dtype}), 1, look)
    return seen[0]


def changed_share(model: Path, folder: Path, device: str) -> float:
    """Return the share of the weights, embeddings excluded, that a step of lr 1e-6 changes in bf16."""
    before: list[State] = []

    def look(trainer: RankTrainer) -> None:
        if {weight.dtype for weight in trainer.model.parameters()} != {torch.float32}:
            raise CheckFailed("masters are not in float32")
        before.append(state_of(trainer, lambda weight: weight))

    tables: dict[str, dict[str, Any]] = {
        "model": {"dtype": "bfloat16"},
        "optimizer": {"lr": 1e-6, "eps": 1e-8},
    }
    after = learn(settings_of(model, folder, device, **tables), 1, look)
    weights = {name: weight for name, weight in before[0].items() if "embed" not in name}
    changed = sum(int((after[name] != weight).sum()) for name, weight in weights.items())
    return changed / sum(weight.numel() for weight in weights.values())
