"""Images of episodes in a run: fetched once, given to the model, and an episode without its image is left out."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import Connection, delete

from gateway.store.models import ImageRow, ImageUseRow
from headgate.client import GatewayClient
from headgate.types import Episode, Group, ImageSpan
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.vision_model import image_part, png, save_vision_model
from tests.harness.waiting import within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, settings_of
from tests.unit.trainer.trees import prompt
from tests.unit.trainer.vision_episodes import name_of
from trainer.config.settings import Settings
from trainer.errors import FeedBroken
from trainer.loop.images import EpisodeImages
from trainer.loop.training_loop import TrainingLoop
from trainer.rank_trainer import RankTrainer
from trainer.report.metrics import Clock
from trainer.state.images import ImageFiles

RED, BLUE = png(56, 84, (255, 0, 0)), png(84, 56, (0, 0, 255))
NAMES = {name_of(RED), name_of(BLUE)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "model"
    save_vision_model(directory, seed=3)
    return directory


@pytest.fixture
async def gateway(model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    own = {"path": str(model), "family": "template", "images": True}
    staleness = {"batch": 2, "eta": 1, "min_members": 1}
    async with run_gateway(
        settings_for(model, tmp_path, models={"demo": own}, staleness=staleness, update={"probe": False})
    ) as running:
        yield running


def settings(gateway: RunningGateway, model: Path, work: Path, every: int = 1) -> Settings:
    found = settings_of(gateway, model, work, every=every, steps=3, deterministic=True)
    by_rows = found.model.model_copy(update={"attention": "rows"})
    return found.model_copy(update={"model": by_rows})


def pictures(text: str) -> list[dict[str, Any]]:
    """A question with two images, or with one."""
    seen = [image_part(RED), image_part(BLUE)] if len(text) % 2 else [image_part(BLUE)]
    return [*seen, {"type": "text", "text": text}]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each image was requested."""
    found: Counter[str] = Counter()
    image = GatewayClient.image

    async def counted(self: GatewayClient, name: str) -> bytes:
        found[name] += 1
        return await image(self, name)

    monkeypatch.setattr(GatewayClient, "image", counted)
    return found


async def test_steps_are_made_of_what_was_seen_and_an_image_is_fetched_once(
    gateway: RunningGateway, model: Path, tmp_path: Path, fetched: Counter[str]
) -> None:
    given = settings(gateway, model, tmp_path)
    opened = loop_of(gateway, given)
    async with episodes(gateway, content=pictures), opened as loop, within("the trainer is through", 120):
        await loop.train()
    records = [json.loads(line) for line in (given.run.dir / "metrics.jsonl").open()]
    assert [record["version"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["trained_tokens"] > 0
        assert record["grad_norm"] > 0
        assert record["computed_tokens"] > 2 * record["trained_tokens"], "prompts, whose images are tokens"
        assert not [name for name in record if name.startswith("masked_tokens/image")]
    assert fetched == dict.fromkeys(NAMES, 1)


async def test_batches_are_trained_again_on_the_same_images_after_a_kill(
    gateway: RunningGateway, model: Path, tmp_path: Path, fetched: Counter[str], capfd: Any
) -> None:
    given = settings(gateway, model, tmp_path, every=4)
    async with episodes(gateway, content=pictures), within("the trainer is through", 120):
        async with loop_of(gateway, given) as loop:
            for _ in range(2):
                await train_one_without_checkpoint(loop)
            lost = loop.trainer
        shutil.rmtree(given.run.dir / "images")
        async with loop_of(gateway, given) as loop:
            trainer = loop.trainer
            assert (trainer.version, trainer.parent) == (2, 1)
    for ours, theirs in zip(trainer.model.parameters(), lost.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert "bit by bit" in capfd.readouterr().err
    assert fetched == dict.fromkeys(NAMES, 2)


async def train_one_without_checkpoint(loop: TrainingLoop) -> None:
    await loop.feed.lease()
    loop.trainer.step(await loop.stream(Clock()))
    await loop.publication.publish()
    await loop.ack()


async def test_an_episode_is_not_trained_whose_image_is_gone_and_the_run_goes_on(
    gateway: RunningGateway, model: Path, tmp_path: Path, capfd: Any
) -> None:
    given = settings(gateway, model, tmp_path)
    async with loop_of(gateway, given) as loop, within("the trainer is through", 120):
        for seen in (RED, BLUE):
            for reward in (0.0, 1.0):
                opened = await gateway.admin.open_episode(name_of(seen), name_of(seen), 2)
                headers = {"Authorization": f"Bearer {opened.api_key}"}
                messages = [{"role": "user", "content": [image_part(seen), {"type": "text", "text": "hi"}]}]
                assert (await gateway.chat(headers, messages=messages, max_tokens=4)).is_success
                await gateway.admin.reward(opened.episode_id, reward)
        await gateway.services.database.submit(forget_red)
        await loop.feed.lease()
        measured = loop.trainer.step(await loop.stream(Clock()))
    assert 0 < measured["trained_tokens"] <= 8
    assert 0 < measured["masked_tokens/image_missing"] <= 8
    assert f"the image {name_of(RED)} is no longer stored by the gateway" in capfd.readouterr().err


def forget_red(connection: Connection) -> None:
    for row in (ImageUseRow, ImageRow):
        connection.execute(delete(row).where(row.hash == name_of(RED)))


async def test_an_image_that_is_not_what_was_recorded_is_missing(
    gateway: RunningGateway, model: Path, tmp_path: Path
) -> None:
    trainer = RankTrainer.open(settings(gateway, model, tmp_path))

    class Gateway:
        async def image(self, name: str) -> bytes:
            return data

    messages: list[str] = []
    images = EpisodeImages(Gateway(), trainer.images, trainer.vision_inputs, messages.append)  # type: ignore[arg-type]
    for data, tokens, why in (
        (RED, 7, "is 6 tokens here and was 7"),
        (RED[:60], 6, "cannot be read"),
        (RED, 6, ""),
    ):
        messages.clear()
        assert await images.fetch([group_with(name_of(data), tokens)]) == ({name_of(data)} if why else set())
        assert [why in each for each in messages] == [True] * len(why[:1])
    data = BLUE
    with pytest.raises(FeedBroken, match="has the hash"):
        await images.fetch([group_with("ab" * 32, 6)])


def group_with(name: str, tokens: int) -> Group:
    node = replace(prompt(0, -1, 0, [0] * tokens), images=(ImageSpan(name, 0, tokens),))
    return Group("g", "g", 0, (Episode("e", 1.0, (node,)),))


def test_files_beyond_the_bound_go_that_were_used_longest_ago(tmp_path: Path) -> None:
    files = ImageFiles(tmp_path / "images", 250)
    files.trim()
    kept = [bytes([n]) * 100 for n in range(4)]
    for n, data in enumerate(kept[:3]):
        files.write(name_of(data), data)
        stamp = 1_000_000 + n
        os.utime(tmp_path / "images" / name_of(data), (stamp, stamp))
    assert files.has(name_of(kept[0])), "used now"
    files.trim()
    assert [files.has(name_of(data)) for data in kept] == [True, False, True, False]
    assert files.read(name_of(kept[2])) == kept[2]
