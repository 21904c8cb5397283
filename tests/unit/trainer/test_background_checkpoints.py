"""Training goes on while a checkpoint is written, fails when that does, and ends with one when it is stopped."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gateway.weights import folders
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import result_of, until
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import ProbelessLearner, settings_of, train_one, trainer_of
from trainer.errors import CheckpointError
from trainer.loop.children import watch
from trainer.loop.clock import Clock
from trainer.loop.run import Trainer, run
from trainer.model import shards
from trainer.state import cadence, checkpoint

LIMIT_S = 120.0


class SlowWrites:
    """Checkpoints that are written beside training wait, before their first byte, until they are let through."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_through = threading.Event(), threading.Event()
        inner = shards.write

        def write(*arguments: Any) -> Any:
            if threading.current_thread().name.startswith("checkpoint"):
                self.begun.set()
                assert self.let_through.wait(LIMIT_S)
            return inner(*arguments)

        patch.setattr(shards, "write", write)


def is_whole(trainer: Trainer, version: int) -> bool:
    return (trainer.learner.checkpoints / f"v{version:06d}" / "state.json").exists()


@pytest.mark.parametrize("every", [2, "auto"])
async def test_steps_versions_and_acknowledgements_go_on_while_a_checkpoint_is_written(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    writes, steps = SlowWrites(monkeypatch), 6
    settings = settings_of(gateway, tiny_model, tmp_path, every=every, steps=steps)
    kept = {
        name: getattr(settings, name).model_copy(update={"keep": steps}) for name in ("checkpoint", "weights")
    }
    settings = settings.model_copy(update=kept)
    if every == "auto":
        monkeypatch.setattr(cadence, "SHARE", 1e9)  # each is due as soon as the one before is written
    named: list[str] = []
    async with episodes(gateway), trainer_of(gateway, settings) as trainer:
        first, waits = (2, 3) if every == 2 else (1, 5)
        acknowledge = trainer.feed.ack

        async def ack(path: str) -> None:
            named.append(Path(path).name)
            await acknowledge(path)

        monkeypatch.setattr(trainer.feed, "ack", ack)
        running = asyncio.create_task(watch(trainer.train(), trainer.checkpoints.watch()))
        try:

            async def acknowledged() -> bool:
                status = await gateway.admin.status()
                return running.done() or (status["newest_version"], status["consumed"]) == (waits, waits)

            await until(acknowledged, "steps, versions and acknowledgements go on", LIMIT_S)
            assert not running.done()
            assert writes.begun.is_set()
            assert not is_whole(trainer, first)
            assert set(named) == {"v000000"}, "the newest that is whole"
        finally:
            writes.let_through.set()
        await result_of(running, "the trainer is through", LIMIT_S)
        assert named[-1] == f"v{steps:06d}"
        stored = load_file(next((trainer.learner.checkpoints / f"v{first:06d}" / "tensors").iterdir()))
        published = load_file(trainer.weights.path(first) / "model.safetensors")
        for name, value in published.items():
            assert torch.equal(stored[f"weight/{name}"], value), "later steps are not in it"


async def test_a_run_that_is_stopped_between_two_checkpoints_writes_one(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loop.run.Learner", ProbelessLearner)
    settings = settings_of(gateway, tiny_model, tmp_path, every=100, steps=9)
    async with episodes(gateway):
        running = asyncio.create_task(run(settings))

        async def two_are_trained() -> bool:
            return running.done() or (await gateway.admin.status())["consumed"] >= 2

        await until(two_are_trained, "two batches are trained", LIMIT_S)
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    (newest, *_) = checkpoint.newest_first(settings.run.dir / "checkpoints")
    status = await gateway.admin.status()
    assert folders.version_of(newest.name) >= status["consumed"], "nothing has to be trained again"


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_though_there_is_no_batch(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = SlowWrites(monkeypatch)
    settings = settings_of(gateway, tiny_model, tmp_path, every=2, steps=9)
    async with trainer_of(gateway, settings) as trainer:
        async with episodes(gateway):
            await train_one(trainer)
            await trainer.feed.lease()
            trainer.learner.step(await trainer.stream(Clock()))
        await trainer.checkpoints.after_step()
        await until(writes.begun.is_set, "the checkpoint is begun", LIMIT_S)
        shutil.rmtree(trainer.learner.checkpoints)
        trainer.learner.checkpoints.write_text("no folder")
        writes.let_through.set()
        idle = asyncio.Event()
        with pytest.raises(CheckpointError, match=str(trainer.learner.checkpoints / "v000002")):
            await result_of(watch(idle.wait(), trainer.checkpoints.watch()), "the run ends", LIMIT_S)
