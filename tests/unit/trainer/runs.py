"""Trainers of a tiny model on batches that a test made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.harness.gateways import RunningGateway
from trainer.config.settings import Settings
from trainer.loop.training_loop import TrainingLoop
from trainer.rank_trainer import RankTrainer
from trainer.report.metrics import Clock, Metrics
from trainer.report.tracking import Trackers

CONFIG = """
[run]
dir = "{work}/run"
steps = 3
device = "cpu"
[gateway]
url = "http://127.0.0.1:1"
[model]
path = "{model}"
[optimizer]
lr = 1e-2
"""
"""The file of a run that needs no gateway."""


def settings_of(
    gateway: RunningGateway,
    model: Path,
    tmp_path: Path,
    name: str | None = None,
    every: int | str = 1,
    nodes: Sequence[str] = (),
    **run: Any,
) -> Settings:
    return Settings.parse({
        "run": {"dir": tmp_path / "run", "steps": 2, "device": "cpu", "threads": 1, **run},
        "gateway": {"url": gateway.url, "timeout_s": 300, "model": name, "nodes": nodes},
        "model": {"path": model},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": every},
    })  # fmt: skip


def offline_settings(model: Path, work: Path, /, **tables: Mapping[str, Any]) -> Settings:
    """Settings of a trainer that a test feeds without a gateway; `tables` are merged into these."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": work, "steps": 9, "device": "cpu", "threads": 1, "deterministic": True},
        "gateway": {"url": "http://127.0.0.1:1"},
        "model": {"path": model},
        "optimizer": {"lr": 1e-3},
    }
    return Settings.parse(values | {name: values.get(name, {}) | {**table} for name, table in tables.items()})


@asynccontextmanager
async def loop_of(
    gateway: RunningGateway, settings: Settings, trackers: Trackers | None = None, *, from_older: bool = False
) -> AsyncIterator[TrainingLoop]:
    with Metrics(settings.run.dir, settings.run.steps, trackers=trackers) as metrics:
        trainer = RankTrainer.open(settings, older=True)
        loop = TrainingLoop(settings, trainer, gateway.admin, metrics, from_older=from_older)
        await loop.check_versions()
        try:
            yield loop
        finally:
            await loop.publication.close()


async def train_one(loop: TrainingLoop, *, publish: bool = True, ack: bool = True) -> None:
    """One turn of the loop, up to the checkpoint at least."""
    await loop.feed.lease()
    loop.trainer.step(await loop.stream(Clock()))
    await loop.checkpoints.write()
    if publish:
        await loop.publication.publish()
    if publish and ack:
        await loop.ack()
