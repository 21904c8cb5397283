"""With `[checkpoint] every` above 1, training goes on while a checkpoint is written, and fails when that does."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.gateways import RunningGateway
from tests.harness.waiting import result_of, until
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import settings_of, train_one, trainer_of
from trainer.errors import CheckpointError
from trainer.loop.children import watch
from trainer.loop.clock import Clock
from trainer.loop.run import Trainer
from trainer.model import parallel

LIMIT_S = 120.0


class SlowWrites:
    """Checkpoints that are written beside training wait, before their first byte, until they are let through."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_through = threading.Event(), threading.Event()
        inner = parallel.write

        def write(*arguments: Any) -> None:
            if threading.current_thread().name.startswith("checkpoint"):
                self.begun.set()
                assert self.let_through.wait(LIMIT_S)
            inner(*arguments)

        patch.setattr(parallel, "write", write)


def is_whole(trainer: Trainer, version: int) -> bool:
    return (trainer.learner.checkpoints / f"v{version:06d}" / "state.json").exists()


async def test_the_next_step_goes_on_and_its_version_waits_until_the_checkpoint_is_whole(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = SlowWrites(monkeypatch)
    settings = settings_of(gateway, tiny_model, tmp_path, every=2, steps=4)
    whole_at: dict[int, bool] = {}
    named: list[str] = []
    async with episodes(gateway), trainer_of(gateway, settings) as trainer:
        write_weights = trainer.weights.write

        def write(version: int, *arguments: Any) -> Path:
            whole_at[version] = is_whole(trainer, 2)
            return write_weights(version, *arguments)

        acknowledge = trainer.feed.ack

        async def ack(path: str) -> None:
            named.append(Path(path).name)
            await acknowledge(path)

        monkeypatch.setattr(trainer.weights, "write", write)
        monkeypatch.setattr(trainer.feed, "ack", ack)
        running = asyncio.create_task(watch(trainer.train(), trainer.checkpoints.watch()))
        try:
            await until(
                lambda: running.done() or trainer.learner.steps == 3, "a step is made meanwhile", LIMIT_S
            )
            status = await gateway.admin.status()
            assert (status["newest_version"], status["consumed"]) == (2, 2), (
                "the version is out, and the batch done"
            )
            assert writes.begun.is_set()
            assert not is_whole(trainer, 2)
        finally:
            writes.let_through.set()
        await result_of(running, "the trainer is through", LIMIT_S)
        assert named == ["v000000", "v000000", "v000002", "v000004"]
        assert whole_at == {1: False, 2: False, 3: True, 4: True}
        stored = load_file(next((trainer.learner.checkpoints / "v000002" / "tensors").iterdir()))
        published = load_file(trainer.weights.path(2) / "model.safetensors")
        for name, value in published.items():
            assert torch.equal(stored[f"weight/{name}"], value), "later steps are not in it"


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
