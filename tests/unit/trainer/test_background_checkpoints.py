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

from headgate.weights import folders
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import result_of, until
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, settings_of, train_one
from trainer.errors import CheckpointError
from trainer.loop import checkpoints
from trainer.loop.run import run
from trainer.loop.tasks import run_with_companions
from trainer.loop.training_loop import TrainingLoop
from trainer.model import shards
from trainer.report.metrics import Clock
from trainer.state import checkpoint

LIMIT_S = 120.0


class SlowWrites:
    """Checkpoints that are written during training wait, before their first byte, until the test releases them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_through = threading.Event(), threading.Event()
        inner = shards.write

        def write(*arguments: Any) -> Any:
            if threading.current_thread().name.startswith("checkpoint"):
                self.begun.set()
                assert self.let_through.wait(LIMIT_S)
            return inner(*arguments)

        patch.setattr(shards, "write", write)


def is_whole(loop: TrainingLoop, version: int) -> bool:
    return (loop.trainer.checkpoints / f"v{version:06d}" / "state.json").exists()


@pytest.mark.parametrize("every", [2, pytest.param("auto", marks=pytest.mark.long)])
async def test_steps_versions_and_acknowledgements_go_on_while_a_checkpoint_is_written(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    writes, steps = SlowWrites(monkeypatch), 6
    settings = settings_of(gateway, tiny_model, tmp_path, every=every, steps=steps)
    kept = {
        name: getattr(settings, name).model_copy(update={"keep": steps}) for name in ("checkpoint", "publish")
    }
    settings = settings.model_copy(update=kept)
    if every == "auto":
        monkeypatch.setattr(checkpoints, "SHARE", 1e9)  # each is due as soon as the one before is written
    named: list[str] = []
    async with episodes(gateway), loop_of(gateway, settings) as loop:
        first, waits = (2, 3) if every == 2 else (1, 5)
        acknowledge = loop.feed.ack

        async def ack(path: str) -> None:
            named.append(Path(path).name)
            await acknowledge(path)

        monkeypatch.setattr(loop.feed, "ack", ack)
        running = asyncio.create_task(run_with_companions(loop.train(), loop.checkpoints.watch()))
        try:

            async def acknowledged() -> bool:
                status = await gateway.admin.status()
                return running.done() or (status["newest_version"], status["consumed"]) == (waits, waits)

            await until(acknowledged, "steps, versions and acknowledgements go on", LIMIT_S)
            assert not running.done()
            assert writes.begun.is_set()
            assert not is_whole(loop, first)
            assert set(named) == {"v000000"}, "the newest that is whole"
        finally:
            writes.let_through.set()
        await result_of(running, "the trainer is through", LIMIT_S)
        assert named[-1] == f"v{steps:06d}"
        stored = load_file(next((loop.trainer.checkpoints / f"v{first:06d}" / "tensors").iterdir()))
        published = load_file(loop.weights.path(first) / "model.safetensors")
        for name, value in published.items():
            assert torch.equal(stored[f"weight/{name}"], value), "later steps are not in it"


async def test_a_run_that_is_stopped_between_two_checkpoints_writes_one(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
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
    async with loop_of(gateway, settings) as loop:
        async with episodes(gateway):
            await train_one(loop)
            await loop.feed.lease()
            loop.trainer.step(await loop.stream(Clock()))
        await loop.checkpoints.after_step()
        await until(writes.begun.is_set, "the checkpoint is begun", LIMIT_S)
        shutil.rmtree(loop.trainer.checkpoints)
        loop.trainer.checkpoints.write_text("no folder")
        writes.let_through.set()
        idle = asyncio.Event()
        with pytest.raises(CheckpointError, match=str(loop.trainer.checkpoints / "v000002")):
            await result_of(
                run_with_companions(idle.wait(), loop.checkpoints.watch()), "the run ends", LIMIT_S
            )
