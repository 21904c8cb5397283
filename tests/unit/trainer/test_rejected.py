"""Versions that the gateway rejects: the trainer stops with one sentence, which states how to continue."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gateway.updates.weights_check import read_weights
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, offline_settings, settings_of, train_one
from trainer.config.settings import Settings
from trainer.errors import PublishFailed, VersionRejected
from trainer.loop.training_loop import TrainingLoop
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_trainer import RankTrainer
from trainer.report.metrics import Clock

NAME = "model.layers.1.mlp.up_proj.weight"


def kept_once(settings: Settings) -> Settings:
    """The settings with `keep = 1`, the fewest checkpoints."""
    return settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"keep": 1})})


async def train_badly(loop: TrainingLoop) -> None:
    """A step that ends in one NaN in a layer."""
    await loop.feed.lease()
    loop.trainer.step(await loop.stream(Clock()))
    with torch.no_grad():
        dict(loop.trainer.model.named_parameters())[NAME][3, 4] = float("nan")
    await loop.checkpoints.after_step()
    await loop.publication.publish()


async def test_a_nan_in_a_layer_stops_the_training_and_the_last_good_checkpoint_stays(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = kept_once(settings_of(gateway, tiny_model, tmp_path))
    async with episodes(gateway), within("the trainer is through", 120):
        async with loop_of(gateway, settings) as loop:
            await train_one(loop)
            with pytest.raises(VersionRejected) as stopped:
                await train_badly(loop)
        message = str(stopped.value)
        assert f"tensor '{NAME}' has numbers that are not finite" in message
        assert str(loop.trainer.checkpoints / "v000002") in message
        assert "\n" not in message
        assert sorted(p.name for p in loop.trainer.checkpoints.glob("v*")) == ["v000001", "v000002"]
        assert (await gateway.admin.status())["newest_version"] == 1

        with pytest.raises(
            VersionRejected
        ) as again:  # the next start, before anything is published or leased
            async with loop_of(gateway, settings):
                pass
        assert str(again.value) == message
        assert (await gateway.admin.status())["newest_version"] == 1

        shutil.rmtree(loop.trainer.checkpoints / "v000002")
        async with loop_of(gateway, settings) as loop:
            assert (loop.trainer.version, loop.trainer.parent, loop.trainer.steps) == (3, 1, 1)
            await loop.train()
    assert (await gateway.admin.status())["version"] == 4


async def test_with_fewer_checkpoints_the_next_start_goes_on_from_the_newest(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, every=3, steps=5)
    async with episodes(gateway), within("the trainer is through", 120):
        async with loop_of(gateway, settings) as loop:
            with pytest.raises(VersionRejected, match="the next start continues from the newest checkpoint"):
                await train_badly(loop)
            await loop.ack()  # comes before engines have shown that a version is bad
        async with loop_of(gateway, settings) as loop:
            assert (loop.trainer.version, loop.trainer.steps) == (2, 0)
        output = " ".join(capsys.readouterr().err.split())
        assert "as version 2, without batch 0: acknowledged, and not trained again" in output
    assert (await gateway.admin.status())["version"] == 2


async def test_a_version_that_engines_fail_with_stops_the_training_with_the_engines_words(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = WeightsDirectory.write

    def write_ill(self: WeightsDirectory, *arguments: Any) -> Path:
        path = known(self, *arguments)
        (path / "faults.json").write_text('{"loading": "fails"}')
        return path

    monkeypatch.setattr(WeightsDirectory, "write", write_ill)
    settings = settings_of(gateway, tiny_model, tmp_path)
    async with episodes(gateway), within("the trainer is through", 120):
        async with loop_of(gateway, settings) as loop:
            with pytest.raises(VersionRejected) as stopped:
                await train_one(loop)
        assert "version 1 is bad: demo-0: " in str(stopped.value)
        assert "these weights cannot be loaded (fault)" in str(stopped.value)
        status = await gateway.admin.status()
        assert [bad["version"] for bad in status["bad_versions"]] == [1]
        assert (status["engines"][0]["state"], status["version"]) == ("open", 0)
        assert stopped.value.lasts, "its checkpoint has the same weights"
        with pytest.raises(VersionRejected):
            async with loop_of(gateway, settings):
                pass


async def test_a_second_version_that_is_refused_ends_the_attempts(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, every=3, steps=5)
    async with episodes(gateway), within("the trainer is through", 120):
        async with loop_of(gateway, settings) as loop:
            with pytest.raises(VersionRejected) as first:
                await train_badly(loop)
            await loop.ack()
        async with loop_of(gateway, settings) as loop:
            loop.weights.reject(loop.trainer.version, "as this test has it")
            with pytest.raises(VersionRejected, match="was refused too") as second:
                await train_badly(loop)
    assert (first.value.lasts, second.value.lasts) == (False, True)


async def test_a_version_that_no_engine_has_tried_is_published_again(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    """A gateway that was just started has no engines."""
    untried = iter([{"state": "failed", "bad": False, "why": "no engine loaded it", "report": []}])
    settings = settings_of(gateway, tiny_model, tmp_path, steps=1)
    async with episodes(gateway), within("the trainer is through", 120), loop_of(gateway, settings) as loop:
        publish = loop.feed.publish

        async def published(*arguments: Any) -> dict[str, Any]:
            return next(untried, None) or await publish(*arguments)

        loop.feed.publish = published  # type: ignore[method-assign]
        await train_one(loop)
    assert next(untried, None) is None
    assert (await gateway.admin.status())["version"] == 1


async def test_a_version_that_no_engine_loads_may_be_published_again(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, steps=1)
    async with episodes(gateway), within("the trainer is through", 120):
        async with loop_of(gateway, settings) as loop:
            await loop.feed.lease()
            loop.trainer.step(await loop.stream(Clock()))
            await loop.checkpoints.write()
            await gateway.fake("faults", fail_load=True)
            with pytest.raises(PublishFailed) as failed:
                await loop.publication.publish()
        assert not isinstance(failed.value, VersionRejected)
        assert "no engine loaded version 1: demo-0: " in str(failed.value)
        assert "load failed (fault)" in str(failed.value)
        assert "{" not in str(failed.value), "it is a sentence"
        await gateway.fake("faults", fail_load=False)
        async with loop_of(gateway, settings) as loop:
            await loop.train()
    assert (await gateway.admin.status())["version"] == 1


def test_tensors_that_the_model_class_does_not_know_are_listed_as_unchanged(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Such as a draft head's: Transformers leaves them out of what it saves."""
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    tensors: dict[str, Any] = load_file(base / "model.safetensors")
    save_file({**tensors, "mtp.head.weight": torch.ones(2)}, base / "model.safetensors", {"format": "pt"})
    trainer = RankTrainer.open(offline_settings(base, tmp_path / "run"))
    path = WeightsDirectory(tmp_path / "weights", base).write(1, 0, trainer.model, None)
    assert json.loads((path / "manifest.json").read_text())["unchanged"] == ["mtp.head.weight"]
    assert read_weights(path, 1, base).version == 1
