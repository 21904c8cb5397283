"""Trainers of a tiny model on batches that a test made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.harness.gateways import RunningGateway
from trainer.data.batch import Batch
from trainer.learner import Learner
from trainer.loop.clock import Clock
from trainer.loop.run import Trainer
from trainer.report.metrics import Metrics
from trainer.report.senders import Senders
from trainer.settings import Settings

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
"""The file of a run that asks no gateway."""


class ProbelessLearner(Learner):
    """The fake engine's log-probabilities are no model's, so a probe would rightly fail."""

    def step(self, batch: Batch) -> dict[str, float]:
        measured = super().step(batch)
        self.probe = None
        return measured


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
        "gateway": {"url": gateway.url, "answer_s": 300, "model": name, "nodes": nodes},
        "model": {"path": model},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": every},
    })  # fmt: skip


@asynccontextmanager
async def trainer_of(
    gateway: RunningGateway, settings: Settings, senders: Senders | None = None, *, from_older: bool = False
) -> AsyncIterator[Trainer]:
    with Metrics(settings.run.dir, settings.run.steps, senders=senders) as metrics:
        learner = ProbelessLearner.open(settings, older=True)
        trainer = Trainer(settings, learner, gateway.admin, metrics, from_older=from_older)
        await trainer.check_versions()
        try:
            yield trainer
        finally:
            await trainer.publication.close()


async def train_one(trainer: Trainer, *, publish: bool = True, ack: bool = True) -> None:
    """One turn of the loop, up to the checkpoint at least."""
    await trainer.feed.lease()
    trainer.learner.step(await trainer.stream(Clock()))
    await trainer.checkpoint()
    if publish:
        await trainer.publish()
    if publish and ack:
        await trainer.ack()
