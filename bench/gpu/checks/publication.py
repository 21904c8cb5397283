"""A checkpoint and a published version: seconds and GB/s of writing both, and a restored state that is equal bit by bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from bench.gpu.batches import distance, state_of
from bench.gpu.checks.alone import rollouts_of, settings_of
from bench.gpu.checks.place import Figures, Place, require
from bench.trainer.headgate import groups_of
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer

T = TypeVar("T")


def measure(place: Place) -> Figures:
    """Return seconds and GB/s of `checkpoint`, `restore`, `gather` and `publish`."""
    workload, model = place.workload, place.model()
    trainer = RankTrainer.open(settings_of(workload, model, place.folder / "run", place.device))
    trainer.train(groups_of(rollouts_of(workload, 1)))
    figures: Figures = {}
    before = state_of(trainer, lambda weight: weight)
    path = _timed(figures, "checkpoint", trainer.save_checkpoint)
    figures["checkpoint"]["gb"] = _gb(path)
    _timed(figures, "restore", lambda: trainer.restore(path))
    figures["restore"]["gb"] = _gb(path)
    same = distance(state_of(trainer, lambda weight: weight), before) == 0.0
    state = _timed(figures, "gather", trainer.gather_weights)
    figures["gather"]["gb"] = sum(tensor.nbytes for tensor in state.values()) / 1e9
    versions = WeightsDirectory(place.folder / "versions", model)
    written = _timed(
        figures,
        "publish",
        lambda: versions.write(trainer.version, trainer.parent, trainer.model, trainer.probe, state),
    )
    figures["publish"]["gb"] = _gb(written)
    for part in figures.values():
        part["gb_s"] = part["gb"] / part["s"]
    shutdown_ranks(trainer)
    return require(same, "the restored weights differ from those that were saved", figures)


def _timed(figures: Figures, name: str, act: Callable[[], T]) -> T:
    began = time.perf_counter()
    found = act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    figures[name] = {"s": time.perf_counter() - began}
    return found


def _gb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9
