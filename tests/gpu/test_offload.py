"""Tensors that wait in the host's memory change no step, and are not on the device while they wait."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.rank_trainers import CPU_IS_LONG, State, distance, learn, save_tiny, settings_of
from trainer.rank_trainer import RankTrainer

SEVERAL = 4
"""How many times the difference of two equal runs, which is 0 on the CPU, offloading may make: kernels of a GPU may add in
another order from run to run."""
OFFLOADED: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "host"},
    "model": {"dtype": "bfloat16", "activation_checkpointing": 1, "activation_offload": True},
}
KEPT: dict[str, dict[str, Any]] = {"model": {"dtype": "bfloat16", "activation_checkpointing": 1}}


def trained(
    model: Path, folder: Path, device: str, tables: dict[str, dict[str, Any]]
) -> tuple[State, set[str], int]:
    """The weights after three steps, where the moments were between them, and the most memory that was taken."""
    places: set[str] = set()
    gc.collect()  # the trainer before
    before = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

    def look(trainer: RankTrainer) -> None:
        moments = trainer.optimizer.moments()
        places.update(moments[name]["exp_avg"].device.type for name in list(moments)[1:])

    weights = learn(settings_of(model, folder, device, **tables), 3, look)
    return weights, places, torch.cuda.max_memory_allocated() - before if device == "cuda" else 0


@pytest.mark.parametrize("device", CPU_IS_LONG, indirect=True)
def test_offload_changes_no_step(device: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    start = learn(settings_of(model, tmp_path / "start", "cpu"), 0)
    kept, places, most = trained(model, tmp_path / "kept", device, KEPT)
    assert places == {device}
    offloaded, places, least = trained(model, tmp_path / "offloaded", device, OFFLOADED)
    assert places == {"cpu"}
    again = trained(model, tmp_path / "again", device, KEPT)[0] if device == "cuda" else kept
    assert distance(offloaded, kept, over=start) <= SEVERAL * distance(again, kept, over=start)
    assert device == "cpu" or least < most, "a device keeps less"
