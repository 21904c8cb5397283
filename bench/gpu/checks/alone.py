"""The trainer alone on long rows, as prime-rl's published figure was measured: rate, share of the peak, memory, and kernels."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu import figures
from bench.gpu.checks.place import Figures, Place, require
from bench.gpu.workload import THREADS, Workload
from bench.trainer.headgate import groups_of
from bench.trainer.load import Rollout, Turn
from headgate.types import Group
from trainer.config.settings import Settings
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer

WARM_UP, STEPS = 2, 3
"""Steps that are not counted, because kernels are compiled and moments made; and those that are."""
_PROMPT, _KERNELS = 1, 10


def measure(place: Place, **more: Any) -> Figures:
    """Return `bench.gpu.figures.alone`, and the ten kernels with the most time in one step. `more`: of `[model]`."""
    workload = place.workload
    trainer = RankTrainer.open(settings_of(workload, place.model(), place.folder, place.device, **more))
    groups = groups_of(rollouts_of(workload))
    records = [timed(trainer, groups) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    found = figures.alone(workload.config, records, workload.row, figures.peak_of(place.gpu))
    found["kernels"] = [] if place.dry else _kernels(trainer, groups)
    found |= {"published": figures.PUBLISHED, "grad_norm": records[-1]["grad_norm"]}
    shutdown_ranks(trainer)
    return require(math.isfinite(found["grad_norm"]), "the gradient is not finite", found)


def settings_of(workload: Workload, model: Path, folder: Path, device: str, **more: Any) -> Settings:
    """Return the recipe's way: all weights, every activation computed again, a row in each micro-batch; layers not compiled."""
    chosen = {"path": model, "dtype": workload.dtype, "activation_checkpointing": 1, "compile": False, **more}
    return Settings.parse({
        "run": {"dir": folder, "steps": 1_000_000, "device": device, "threads": THREADS[device]},
        "gateway": {"url": "http://127.0.0.1:9"},
        "model": chosen,
        "optimizer": {"lr": 1e-6},
        "batch": {"tokens": workload.row},
    })  # fmt: skip


def rollouts_of(workload: Workload, rows: int | None = None) -> list[Rollout]:
    """Return rows of random tokens, with the log-probabilities of an untrained model; nothing is shared but the first token."""
    draw = np.random.default_rng(1)
    vocabulary = workload.config["vocab_size"]
    found = []
    for number in range(rows or workload.rows):
        ids = draw.integers(0, vocabulary, workload.row, dtype=np.int32)
        logprobs = np.full(workload.row, -math.log(vocabulary), np.float32)
        parts = slice(0, _PROMPT), slice(_PROMPT, None)
        prompt, reply = (
            Turn(turn - 1, turn == 1, ids[part], logprobs[part]) for turn, part in enumerate(parts)
        )
        found.append(Rollout(0, float(number % 2), (prompt, reply)))
    return found


def timed(trainer: RankTrainer, groups: list[Group]) -> dict[str, float]:
    """Return a step's metrics and its seconds."""
    began = time.perf_counter()
    result = trainer.train(groups)
    return result | {"seconds": time.perf_counter() - began}


def _kernels(trainer: RankTrainer, groups: list[Group]) -> list[dict[str, Any]]:
    """Return the kernels with the most time in one step: name, ms, and share."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.train(groups)
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: row.self_device_time_total, reverse=True)
    total = sum(row.self_device_time_total for row in rows) or 1.0
    return [
        {
            "kernel": row.key[:80],
            "ms": row.self_device_time_total / 1000,
            "share": row.self_device_time_total / total,
        }
        for row in rows[:_KERNELS]
    ]
