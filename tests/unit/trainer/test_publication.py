"""A version is published while the next batch is trained."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.gateways import RunningGateway
from tests.harness.waiting import result_of, until, within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, offline_settings, settings_of, train_one
from trainer.errors import PublishFailed
from trainer.loop.tasks import run_with_companions
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_trainer import RankTrainer

LIMIT_S = 120.0


class HeldWrites:
    """Versions are not written, from their first byte on, until they are let through."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_through = threading.Event(), threading.Event()
        self.written: list[int] = []
        inner = WeightsDirectory.write

        def write(directory: WeightsDirectory, version: int, *arguments: Any) -> Path:
            self.begun.set()
            assert self.let_through.wait(LIMIT_S)
            path = inner(directory, version, *arguments)
            self.written.append(version)
            return path

        patch.setattr(WeightsDirectory, "write", write)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWrites]:
    writes = HeldWrites(monkeypatch)
    yield writes
    writes.let_through.set()


async def test_the_next_batch_is_trained_on_during_publication_and_its_step_waits(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, held: HeldWrites
) -> None:
    """All of batch 1 is in the gradient before version 1 is written; it was sampled by version 0, which eta = 1 allows."""
    settings = settings_of(gateway, tiny_model, tmp_path)
    taken: list[bool] = []
    async with episodes(gateway), loop_of(gateway, settings) as loop:
        stream = loop.stream

        async def streamed(*arguments: Any) -> Any:
            batch = await stream(*arguments)
            taken.append(held.begun.is_set())
            return batch

        loop.stream = streamed  # type: ignore[method-assign]
        running = asyncio.create_task(run_with_companions(loop.train(), *loop.background_tasks()))
        await until(lambda: running.done() or len(taken) == 2, "batch 1 is in the gradient", LIMIT_S)
        status = await gateway.admin.status()
        assert (status["newest_version"], status["consumed"], taken) == (0, 1, [False, True])
        assert (loop.trainer.steps, held.written) == (1, [])
        held.let_through.set()
        await result_of(running, "the trainer is through", LIMIT_S)
    status = await gateway.admin.status()
    assert (status["version"], status["consumed"], held.written) == (2, 2, [1, 2])
    records = [json.loads(line) for line in (settings.run.dir / "metrics.jsonl").open()]
    assert [record["staleness_max"] for record in records] == [0, 1]
    for record in records:
        assert record["blocked_share"] == record["seconds/publish"] / record["seconds/total"] > 0


async def test_a_version_that_cannot_be_written_ends_the_run_though_there_is_no_batch(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, held: HeldWrites
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    async with loop_of(gateway, settings) as loop:
        async with episodes(gateway):
            await train_one(loop, publish=False)
            await loop.publication.begin()
        loop.weights.directory.mkdir(exist_ok=True)
        loop.weights.directory.rmdir()
        loop.weights.directory.write_text("no folder")
        held.let_through.set()
        idle = asyncio.Event()
        with pytest.raises(PublishFailed, match=f"version 1 cannot be written: .*{loop.weights.directory}"):
            await result_of(
                run_with_companions(idle.wait(), *loop.background_tasks()), "the run ends", LIMIT_S
            )


async def test_closing_waits_for_the_thread_that_writes(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, held: HeldWrites
) -> None:
    async with (
        episodes(gateway),
        loop_of(gateway, settings_of(gateway, tiny_model, tmp_path)) as loop,
        within("the trainer is through", LIMIT_S),
    ):
        await train_one(loop, publish=False)
        await loop.publication.begin()
        await until(held.begun.is_set, "the writing is begun", LIMIT_S)
        closing = asyncio.create_task(loop.publication.close())
        (bringing,) = (task for task in asyncio.all_tasks() if task.get_name() == "version 1")
        await until(lambda: bringing.cancelling() > 0, "it is given up", LIMIT_S)
        assert not closing.done()
        held.let_through.set()
        await closing
    assert held.written == [1]
    assert (await gateway.admin.status())["newest_version"] == 0, "it was given up before it was announced"


@pytest.mark.parametrize("adapters", [False, True])
def test_what_is_published_is_a_copy_that_no_step_changes(
    tiny_model: Path, tmp_path: Path, adapters: bool
) -> None:
    model = {"lora": {"rank": 2}} if adapters else {}
    trainer = RankTrainer.open(offline_settings(tiny_model, tmp_path / "run", model=model))
    copy = trainer.gather_adapter() if adapters else trainer.gather_weights()
    before = {name: tensor.clone() for name, tensor in copy.items()}
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.add_(1.0)
    assert all(torch.equal(copy[name], before[name]) for name in before)
    after = trainer.gather_adapter() if adapters else trainer.gather_weights()
    assert not any(torch.equal(after[name], before[name]) for name in before)
