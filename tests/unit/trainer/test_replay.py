"""Going on from a checkpoint that is older than the newest version: the recorded batches again, or a new line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.client import GatewayRefused
from headgate.types import Group, LeasedGroups
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, settings_of
from trainer.config.settings import Settings
from trainer.errors import CheckpointDamaged, LeaseLost
from trainer.loop.feed import Feed
from trainer.loop.training_loop import TrainingLoop
from trainer.model import pretrained as model
from trainer.rank_trainer import RankTrainer
from trainer.report.metrics import Clock

EVERY = 4


async def train(loop: TrainingLoop, *, until: str = "ack") -> None:
    """A step without a checkpoint, up to `until`: write, publish or ack."""
    await loop.feed.lease()
    loop.trainer.step(await loop.stream(Clock()))
    if until == "write":
        trainer = loop.trainer
        loop.weights.write(trainer.version, trainer.parent, trainer.model, trainer.probe)
        return
    await loop.publication.publish()
    if until == "ack":
        await loop.ack()


async def killed_after(gateway: RunningGateway, settings: Settings, *untils: str) -> RankTrainer:
    """Run a trainer and kill it after the last of the given steps; returns the lost state."""
    async with loop_of(gateway, settings) as loop, within("the trainer is through", 120):
        for until in untils:
            await train(loop, until=until)
        return loop.trainer


def same_weights(left: RankTrainer, right: RankTrainer) -> bool:
    pairs = zip(left.model.parameters(), right.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(autouse=True)
async def _agents(gateway: RunningGateway) -> AsyncIterator[None]:
    async with episodes(gateway):
        yield


@pytest.mark.parametrize(
    "last", ["write", *(pytest.param(n, marks=pytest.mark.long) for n in ("publish", "ack"))]
)
async def test_batches_since_the_checkpoint_are_trained_again_and_nothing_is_published_for_it(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, every=EVERY, steps=4)
    lost = await killed_after(gateway, settings, "ack", "ack", last)
    manifest = (settings.run.dir / "weights" / "v000003" / "manifest.json").read_text()
    async with loop_of(gateway, settings) as loop:
        trainer = loop.trainer
        assert (trainer.version, trainer.parent, trainer.steps) == (3, 2, 3)
        assert same_weights(trainer, lost)
        taught = not model.holds(tiny_model, trainer.gather_weights())
        assert taught
        assert "nothing lost, nothing trained twice" in " ".join(capsys.readouterr().err.split())
        async with within("the trainer is through", 120):
            await loop.train()
    assert (settings.run.dir / "weights" / "v000003" / "manifest.json").read_text() == manifest
    status = await gateway.admin.status()
    assert (status["version"], status["consumed"], status["orphaned_versions"]) == (4, 4, [])
    records = [json.loads(line) for line in (settings.run.dir / "metrics.jsonl").open()]
    assert [record["batch"] for record in records] == [3]
    assert [d.name for d in sorted((settings.run.dir / "checkpoints").glob("v*"))] == ["v000000", "v000004"]


@pytest.mark.parametrize(
    ("deterministic", "message"),
    [(False, "deterministic = true would avoid"), (True, "settings, the machine")],
)
async def test_other_weights_than_were_published_begin_a_new_line(
    gateway: RunningGateway,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    deterministic: bool,
    message: str,
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, every=EVERY)
    await killed_after(gateway, settings, "ack", "ack")
    run = settings.run.model_copy(update={"deterministic": deterministic})
    optimizer = settings.optimizer.model_copy(update={"lr": 1e-4})
    changed = settings.model_copy(update={"optimizer": optimizer, "run": run})
    try:
        async with loop_of(gateway, changed) as loop:
            assert (loop.trainer.version, loop.trainer.parent, loop.trainer.steps) == (3, 0, 0)
            assert model.holds(loop.weights.path(3), model.load(tiny_model).state_dict()), (
                "back at the checkpoint"
            )
            assert loop.trainer.saved is not None
            assert loop.trainer.saved.version == 3
    finally:
        torch.use_deterministic_algorithms(False)
    assert message in " ".join(capsys.readouterr().err.split())
    status = await gateway.admin.status()
    assert (status["version"], status["orphaned_versions"]) == (3, [1, 2])


async def test_a_batch_that_a_new_line_was_not_trained_on_is_given_back(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch 1 is complete and leased, and its number is below that of the new line."""
    settings = settings_of(gateway, tiny_model, tmp_path, every=EVERY)
    await killed_after(gateway, settings, "ack", "publish")
    optimizer = settings.optimizer.model_copy(update={"lr": 1e-4})
    async with loop_of(gateway, settings.model_copy(update={"optimizer": optimizer})) as loop:
        assert (loop.trainer.version, loop.trainer.parent) == (3, 0)
        lost = [group.group_id for group in await loop.feed.record(1)]
        async with within("the trainer is through", 120):
            await loop.train()
    trained = {batch["batch"]: batch for batch in await gateway.admin.batches()}
    assert sorted(trained) == [0, 3, 4]
    lost_episodes = await gateway.admin.episodes(group_id=lost[0])
    assert all(["skipped" in json.dumps(await gateway.admin.why(e["episode_id"])) for e in lost_episodes])
    assert len(lost_episodes) == 2
    assert "not trained on the groups of batch 1: given back" in " ".join(capsys.readouterr().err.split())


async def test_a_record_that_is_gone_begins_a_new_line(
    gateway: RunningGateway,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, every=EVERY)
    await killed_after(gateway, settings, "ack", "ack")
    known = Feed.record

    async def record(self: Feed, batch: int) -> tuple[Group, ...]:
        if batch == 1:
            raise GatewayRefused(404, "no batch 1 was trained", "no_batch", None)
        return await known(self, batch)

    monkeypatch.setattr(Feed, "record", record)
    async with loop_of(gateway, settings) as loop:
        assert (loop.trainer.version, loop.trainer.parent, loop.trainer.steps) == (3, 0, 0)
        assert model.holds(loop.weights.path(3), model.load(tiny_model).state_dict()), (
            "back at the checkpoint"
        )
    assert "no batch 1 was trained" in " ".join(capsys.readouterr().err.split())


def damage(settings: Settings, version: int) -> Path:
    """Flip a bit of a checkpoint's tensors."""
    checkpoint = settings.run.dir / "checkpoints" / f"v{version:06d}"
    (file,) = (checkpoint / "tensors").iterdir()
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    return checkpoint


async def test_a_damaged_checkpoint_is_replayed_over_on_request(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, every=EVERY, steps=5)
    async with loop_of(gateway, settings) as loop, within("the trainer is through", 120):
        for _ in range(2):
            await train(loop)
        await loop.checkpoints.write()
        await train(loop)
        lost = loop.trainer
    newest = damage(settings, 2)
    with pytest.raises(
        CheckpointDamaged, match=r"v000002 is damaged: .* v000000, after which batches 0 to 2 were ack"
    ):
        async with loop_of(gateway, settings):
            pass
    assert newest.is_dir(), "nothing was changed"
    async with loop_of(gateway, settings, from_older=True) as loop:
        assert (loop.trainer.version, loop.trainer.steps) == (3, 3)
        assert same_weights(loop.trainer, lost)
    output = " ".join(capsys.readouterr().err.split())
    assert (
        "renamed, and continuing from v000000" in output and "nothing lost, nothing trained twice" in output
    )
    assert newest.with_name("v000002.damaged").is_dir() and not newest.exists()


async def test_a_damaged_checkpoint_after_which_nothing_was_acknowledged_is_gone_without(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, every=EVERY, steps=1)
    async with loop_of(gateway, settings) as loop, within("the trainer is through", 120):
        await loop.feed.lease()
        loop.trainer.step(await loop.stream(Clock()))
        await loop.checkpoints.write()
    damage(settings, 1)
    async with loop_of(gateway, settings) as loop, within("the trainer is through", 120):
        assert loop.trainer.version == 0
        await loop.train()
    assert "renamed, and continuing from v000000" in " ".join(capsys.readouterr().err.split())
    status = await gateway.admin.status()
    assert (status["version"], status["consumed"], status["orphaned_versions"]) == (1, 1, [])


async def test_a_line_that_was_left_is_not_replayed_over(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, every=EVERY)
    async with loop_of(gateway, settings) as loop, within("the trainer is through", 120):
        await train(loop)
        loop.trainer.restore(loop.trainer.checkpoints / "v000000")
        loop.trainer.renumber(2)
        await loop.publication.publish()
    async with loop_of(gateway, settings) as loop:
        assert (loop.trainer.version, loop.trainer.parent) == (3, 0)


async def test_a_lease_that_is_lost_in_the_middle_loses_and_doubles_no_group(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, steps=1)
    seen: list[list[str]] = []
    known = Feed.groups

    async def groups(self: Feed, cursor: int, wait_s: float = 20.0) -> LeasedGroups:
        fetched = await known(self, cursor, wait_s)
        seen.append([group.group_id for group in fetched.groups])
        # What a restart of the gateway, or a renewal that came too late, does to a lease; and the feed is cut up.
        await gateway.admin.nack(self.current_lease, "lost")
        if len(fetched.groups) < 2 or cursor:
            return fetched
        seen[-1:] = [seen[-1][:1]]
        return LeasedGroups(fetched.groups[:1], 1, False)

    monkeypatch.setattr(Feed, "groups", groups)
    async with loop_of(gateway, settings) as loop, within("the trainer is through", 120):
        lease = await loop.feed.lease()
        await loop.work(lease, Clock())
        assert loop.feed.current_lease.fence > lease.fence
    record = await gateway.admin.batch_groups(0)
    assert [name for portion in seen for name in portion] == [group.group_id for group in record]
    assert len([portion for portion in seen if portion]) == 2


async def test_a_lease_that_is_gone_for_good_takes_its_gradient_with_it(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings_of(gateway, tiny_model, tmp_path, steps=1)
    settings = values.model_copy(update={"batch": values.batch.model_copy(update={"tokens": 16})})
    known: Any = RankTrainer.add_groups

    def add_groups(self: RankTrainer, batch: Any, groups: Any) -> None:
        known(self, batch, groups)
        if groups:
            assert any(p.grad is not None for p in self.model.parameters())
            raise LeaseLost("gone")

    monkeypatch.setattr(RankTrainer, "add_groups", add_groups)
    async with loop_of(gateway, settings) as loop, within("the trainer is through", 120):
        with pytest.raises(LeaseLost):
            await loop.work(await loop.feed.lease(), Clock())
        assert all(p.grad is None for p in loop.trainer.model.parameters())
        assert loop.trainer.version == 0
