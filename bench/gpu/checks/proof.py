"""The proof of a weight update at a small learning rate: right versions pass, and the parent's weights are never proven."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from bench.gpu.batches import settings_of
from bench.gpu.checks.place import Figures, Place, require
from bench.trainer import load
from bench.trainer.headgate import groups_of
from headgate.types import Probe
from scheduler.policies.probe import judge
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer

TOLERANCE = 0.15
"""The default of `[update] probe_tolerance`, in nats."""


def measure(place: Place) -> Figures:
    """Return the verdicts of 20 versions at lr 1e-6, with transformers' bf16 pass over the published weights as the engine."""
    steps = 3 if place.dry else 20
    tables: dict[str, dict[str, Any]] = {
        "model": {"dtype": "bfloat16"},
        "optimizer": {"lr": 1e-6, "eps": 1e-8},
        "batch": {"tokens": 512 if place.dry else 8192},
    }
    trainer = RankTrainer.open(settings_of(place.model(), place.folder / "run", place.device, **tables))
    verdicts, gaps, noise = Counter[str](), [], 0.0
    for step in range(steps):
        trainer.train(groups_of(_batch(place, step)))
        assert trainer.probe is not None
        report, noise = _judged(trainer, trainer.probe, noise)
        verdicts[report.verdict] += 1
        gaps.append(report.gap)
    shutdown_ranks(trainer)
    figures: Figures = {"versions": steps, "verdicts": dict(verdicts), "gap_max": max(gaps)}
    return require(not verdicts["failed"], f"{verdicts['failed']} right versions failed", figures)


def _batch(place: Place, step: int) -> list[load.Rollout]:
    sizes = load.Sizes(groups=2, members=4, vocabulary=place.workload.config["vocab_size"])
    median, most = (24, 48) if place.dry else (256, 1024)
    return load.long_tail(sizes, step, prompt=16, median=median, sigma=0.4, most=most)


def _judged(trainer: RankTrainer, probe: Probe, noise: float) -> tuple[Any, float]:
    """Return the report of one version, and the engine's noise for the next."""
    rows = [torch.tensor(sequence) for sequence in probe.sequences]
    measured = torch.cat(trainer.policy.plain(rows)).float().cpu().tolist()
    expected = [value for row in probe.new_logprobs for value in row]
    parent = [value for row in probe.parent_logprobs for value in row]
    report = judge(measured, expected, parent, tolerance=TOLERANCE, noise=max(noise, probe.noise))
    return report, max(noise, report.gap)
