"""float32 masters with bf16 compute: the gradient is the CPU's in float32 but for rounding, and small steps change weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gpu.rank_trainers import State, distance, learn, save_tiny, settings_of, state_of
from trainer.rank_trainer import RankTrainer

BOUND = 0.03
"""The norm of the difference over the norm. A bf16 number is off by up to 0.4 %, and each layer adds to it."""


def first_gradient(model: Path, folder: Path, device: str, dtype: str) -> State:
    """The clipped gradient of one step."""
    seen: list[State] = []

    def look(trainer: RankTrainer) -> None:
        seen.append(state_of(trainer, lambda weight: weight.grad))

    learn(settings_of(model, folder, device, model={"dtype": dtype}), 1, look)
    return seen[0]


def test_the_gradient_in_bf16_is_that_of_float32_on_the_cpu(device: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    expected = first_gradient(model, tmp_path / "cpu", "cpu", "float32")
    found = first_gradient(model, tmp_path / "other", device, "bfloat16")
    assert 1e-5 < distance(found, expected) < BOUND, "above: it is wrong; below: it was not computed in bf16"


def test_the_gradient_in_float32_is_the_cpus(device: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    expected = first_gradient(model, tmp_path / "cpu", "cpu", "float32")
    found = first_gradient(model, tmp_path / "other", device, "float32")
    assert distance(found, expected) < 2e-3, "TF32 at most"


def test_a_step_that_bf16_would_round_away_changes_the_masters(device: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    tables = {"model": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-6, "eps": 1e-8}}
    before: list[State] = []

    def look(trainer: RankTrainer) -> None:
        assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
        before.append(state_of(trainer, lambda weight: weight))

    after = learn(settings_of(model, tmp_path / "run", device, **tables), 1, look)
    changed = sum(
        int((after[name] != weight).sum()) for name, weight in before[0].items() if "embed" not in name
    )
    assert changed > 0.9 * sum(weight.numel() for name, weight in before[0].items() if "embed" not in name)
