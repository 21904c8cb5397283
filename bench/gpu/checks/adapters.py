"""Adapters of a model of 8 billion random weights: two steps, and the memory that `plan-memory` predicts for them."""

from __future__ import annotations

import dataclasses
import json

from bench.gpu import figures
from bench.gpu.checks.alone import rollouts_of, settings_of, timed
from bench.gpu.checks.place import Figures, Place, require
from bench.gpu.workload import ROOT, write_model
from bench.trainer.headgate import groups_of
from trainer.commands.plan_memory import plan
from trainer.memory_plan import GIB
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer

_SHAPE = ROOT / "recipes/shapes/Qwen3-8B/config.json"
_STEPS = 2
_FEWEST, _MOST = 0.8, 1.05
"""The measured memory as a share of the predicted one."""


def measure(place: Place) -> Figures:
    """Return tokens/s, the share of the peak, and GiB next to the plan's. The model is written once, on the local disk."""
    workload = place.workload
    if not place.dry:
        config = json.loads(_SHAPE.read_text())
        workload = dataclasses.replace(workload, name="qwen3-8b", config=config, rows=1)
    model = place.folder / "model"
    write_model(model, workload, place.device)
    settings = settings_of(workload, model, place.folder, place.device, lora={"rank": 16})
    planned = plan(settings)
    trainer = RankTrainer.open(settings)
    groups = groups_of(rollouts_of(workload, 2))
    records = [timed(trainer, groups) for _ in range(1 + _STEPS)][1:]
    shutdown_ranks(trainer)
    found = figures.alone(workload.config, records, workload.row, figures.peak_of(place.gpu))
    found |= {"plan_gib": planned.prediction.total / GIB, "plan_needed_gib": planned.prediction.needed / GIB}
    if place.dry:
        return found
    share = found["memory_gib"] / found["plan_gib"]
    found |= {"share_of_plan": share}
    return require(_FEWEST < share < _MOST, f"memory is {share:.2f} times the plan's", found)
