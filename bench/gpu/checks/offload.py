"""Tensors that wait in the host's memory change no step, and are not on the device while they wait."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from bench.gpu.batches import State, distance, learn, settings_of, tiny_model
from bench.gpu.checks.place import Figures, Place, require
from trainer.rank_trainer import RankTrainer

SEVERAL = 4.0
"""How many times the difference of two equal runs, which is 0 on the CPU, offloading may make: kernels of a GPU may add in
another order from run to run."""
_KEPT: dict[str, dict[str, Any]] = {"model": {"dtype": "bfloat16", "activation_checkpointing": 1}}
_OFFLOADED: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "host"},
    "model": {**_KEPT["model"], "activation_offload": True},
}


def measure(place: Place) -> Figures:
    """Return the distance of the offloaded run, that of an equal run, where moments waited, and the most MiB of both."""
    model = tiny_model(place.folder / "model")
    start = learn(settings_of(model, place.folder / "start", "cpu"), 0)
    kept, at, most = _trained(model, place.folder / "kept", place.device, _KEPT)
    moved, away, least = _trained(model, place.folder / "moved", place.device, _OFFLOADED)
    again = kept if place.dry else _trained(model, place.folder / "again", place.device, _KEPT)[0]
    figures: Figures = {
        "distance": distance(moved, kept, over=start),
        "noise": distance(again, kept, over=start),
        "moments": {"kept": sorted(at), "offloaded": sorted(away)},
        "mib": {"kept": most / 2**20, "offloaded": least / 2**20},
    }
    require(figures["distance"] <= SEVERAL * figures["noise"], "offloading changes a step", figures)
    require((at, away) == ({place.device}, {"cpu"}), "moments are not where they should wait", figures)
    return require(place.dry or least < most, "the device keeps as much", figures)


def _trained(
    model: Path, folder: Path, device: str, tables: dict[str, dict[str, Any]]
) -> tuple[State, set[str], int]:
    """Return the weights after three steps, where the moments were between them, and the most bytes of the device."""
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
