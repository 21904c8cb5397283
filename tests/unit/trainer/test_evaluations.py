"""Evaluation during training: by which version, how often, and what a crash leaves of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.forked_programs import forked
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import until, while_going_on, within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, settings_of, train_one
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.loop.training_loop import TrainingLoop
from trainer.report.tracking import Trackers

AGENT = "tests.harness.eval_agent:solve"
LIMIT_S = 120.0


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A named pipe."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


@pytest.fixture
async def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Evaluations are forked. Not for tests that interrupt one: it ends a little after its stand-in."""
    async with forked(tmp_path / "forked") as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        yield


async def let_through(gate: Path, work: asyncio.Task[None]) -> None:
    """Waits until an agent is at the gate, and opens it for that one, while the loop continues."""

    def opens() -> bool:
        with suppress(OSError):  # no agent reads yet
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False

    await while_going_on(until(opens, "an agent is at the gate", LIMIT_S), work, "the loop has ended")


def evaluating(
    gateway: RunningGateway,
    model: Path,
    tmp_path: Path,
    gate: Path | None = None,
    steps: int = 2,
    **table: Any,
) -> Settings:
    """Settings with two held-out tasks, of which the first waits at the gate."""
    tasks = [{"task_id": f"e{i}", "worth": i} for i in range(2)]
    if gate is not None:
        tasks[0]["gate"] = str(gate)
    file = tmp_path / "held_out.jsonl"
    file.write_text("\n".join(map(json.dumps, tasks)))
    table = {"tasks": [str(file)], "every": 1, "agent": AGENT, **table}
    plain = settings_of(gateway, model, tmp_path, steps=steps)
    return Settings.parse({**plain.model_dump(exclude_unset=True), "eval": table})


@asynccontextmanager
async def running(loop: TrainingLoop) -> AsyncIterator[asyncio.Task[None]]:
    """The loop in the background of a test; what it began is ended with it."""
    work = asyncio.create_task(loop.train(), name="trainer")
    try:
        yield work
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        await loop.evaluations.close()


def lines(settings: Settings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of metrics.jsonl about evaluations, and those about steps."""
    records = [json.loads(line) for line in (settings.run.dir / "metrics.jsonl").open()]
    return [r for r in records if "batch" not in r], [r for r in records if "batch" in r]


async def evaluated(gateway: RunningGateway) -> list[dict[str, Any]]:
    """The evaluation episodes that were rewarded."""
    found = await gateway.admin.episodes(mode="eval", limit=1000)
    return [episode for episode in found if episode["reason"] == "rewarded"]


async def is_rewarded(gateway: RunningGateway, task: str) -> bool:
    return any(episode["task_id"] == task for episode in await evaluated(gateway))


@pytest.mark.usefixtures("forks")
async def test_versions_are_evaluated_before_during_and_after_training(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = evaluating(gateway, tiny_model, tmp_path, steps=3, every=2)
    async with (
        episodes(gateway),
        loop_of(gateway, settings, Trackers(settings)) as loop,
        within("the trainer is through", LIMIT_S),
    ):
        await loop.train()
    found, trained = lines(settings)
    assert [(line["version"], line["step"]) for line in found] == [(0, 0), (2, 2), (3, 3)]
    assert len(trained) == 3
    for line in found:
        assert line["eval/versions"] == {str(line["version"]): 2}
        assert line["eval/reward_mean"] == line["eval/held_out/pass@1"] == 0.5
        assert line["eval/failed"] == 0
    board = EventAccumulator(str(settings.run.dir / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("eval/held_out/reward_mean")] == [
        (0, 0.5),
        (2, 0.5),
        (3, 0.5),
    ]
    assert "evaluation of version 2: reward 0.500 (" in capfd.readouterr().err
    ids = {episode["episode_id"] for episode in await evaluated(gateway)}
    assert len(ids) == 6
    for batch in await gateway.admin.batches():
        groups = await gateway.admin.batch_groups(batch["batch"])
        assert ids.isdisjoint(episode.episode_id for group in groups for episode in group.episodes)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("pinned", [True, False])
async def test_the_next_version_waits_for_an_evaluation_that_is_pinned_and_for_no_other(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, gate: Path, pinned: bool
) -> None:
    """Only publishing waits: the next step has its checkpoint."""
    settings = evaluating(gateway, tiny_model, tmp_path, gate, steps=1, pinned=pinned)
    async with loop_of(gateway, settings) as loop:
        published: list[bool] = []
        offer = loop.feed.publish

        async def publish(*version: Any) -> dict[str, Any]:
            published.append(loop.evaluations.running)
            return await offer(*version)

        loop.feed.publish = publish  # type: ignore[method-assign]
        async with running(loop) as work:
            await until(lambda: is_rewarded(gateway, "e1"), "the other task is done", LIMIT_S)
            async with episodes(gateway):
                if pinned:
                    await until(
                        lambda: loop.trainer.saved is not None and loop.trainer.saved.version == 1,
                        "the step has its checkpoint",
                        LIMIT_S,
                    )
                else:
                    await until(lambda: gateway.model.ledger.rule.version == 1, "version 1 is live", LIMIT_S)
                assert loop.evaluations.running
                await let_through(gate, work)
                await until(lambda: bool(lines(settings)[0]), "it is written down", LIMIT_S)
                await let_through(gate, work)
                async with within("the trainer is through", LIMIT_S):
                    await work
    found, trained = lines(settings)
    assert published == [not pinned]
    assert [line["version"] for line in found] == [0, 1]
    # One of the first evaluation's episodes, the one that was held, was sampled after the gate had opened.
    assert found[0]["eval/versions"] == ({"0": 2} if pinned else {"0": 1, "1": 1})
    assert trained[0].get("seconds/evaluation", 0.0) > 0 or not pinned


async def test_an_interrupted_evaluation_is_begun_again_and_one_that_ended_is_not(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, gate: Path
) -> None:
    settings = evaluating(gateway, tiny_model, tmp_path, gate)
    async with loop_of(gateway, settings) as loop, running(loop):
        await until(lambda: loop.evaluations.running, "it is under way", LIMIT_S)
    assert lines(settings) == ([], [])
    async with loop_of(gateway, settings) as loop, running(loop) as work:
        await let_through(gate, work)
        await until(lambda: bool(lines(settings)[0]), "it is written down", LIMIT_S)
    count = Counter(episode["task_id"] for episode in await evaluated(gateway))
    assert count["e0"] == 1, "the one that was held is the only one"
    (line,), _ = lines(settings)
    assert (line["version"], line["eval/versions"]) == (0, {"0": 2})

    metrics = settings.run.dir / "metrics.jsonl"
    # Once as it is, and once as a trainer leaves it that is killed between the result and its line.
    for text in (metrics.read_text(), ""):
        metrics.write_text(text)
        async with loop_of(gateway, settings) as loop:
            await loop.evaluations.resume()
            await loop.evaluations.begin(0, 0, last=False)
            assert not loop.evaluations.running
        assert [line["version"] for line in lines(settings)[0]] == [0]
    assert Counter(episode["task_id"] for episode in await evaluated(gateway)) == count


@pytest.mark.long
async def test_a_start_with_a_newer_checkpoint_evaluates_what_engines_still_run_before_it_publishes(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, gate: Path
) -> None:
    settings = evaluating(gateway, tiny_model, tmp_path, gate, steps=1)
    async with episodes(gateway):
        async with loop_of(gateway, settings) as loop:
            await loop.evaluations.begin(0, 0, last=False)
            await train_one(loop, publish=False)
            await loop.evaluations.close()
        async with loop_of(gateway, settings) as loop, running(loop) as work:
            assert loop.trainer.version == 1
            await let_through(gate, work)
            await until(lambda: bool(lines(settings)[0]), "it is written down", LIMIT_S)
            await let_through(gate, work)
            async with within("the trainer is through", LIMIT_S):
                await work
    found, _ = lines(settings)
    assert [(line["version"], line["eval/versions"]) for line in found] == [(0, {"0": 2}), (1, {"1": 2})]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"agent": "tests.harness.no_such_module:solve"}, "no_such_module"),
        ({"timeout_s": 0.05}, "longer than [eval] timeout_s = 0.05 s"),
    ],
)
async def test_training_goes_on_without_an_evaluation_that_fails(
    gateway: RunningGateway,
    tiny_model: Path,
    tmp_path: Path,
    gate: Path,
    capfd: pytest.CaptureFixture[str],
    table: dict[str, Any],
    message: str,
) -> None:
    settings = evaluating(gateway, tiny_model, tmp_path, gate, steps=1, **table)
    async with (
        episodes(gateway),
        loop_of(gateway, settings) as loop,
        within("the trainer is through", LIMIT_S),
    ):
        await loop.train()
    assert [len(some) for some in lines(settings)] == [0, 1]
    output = " ".join(capfd.readouterr().err.split())
    assert output.count("failed, and training continues") == 2
    assert message in output


def test_evaluation_during_training_needs_an_agent(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    plain = settings_of(gateway, tiny_model, tmp_path).model_dump(exclude_unset=True)
    with pytest.raises(ConfigError, match=r"\[eval\] every needs an agent"):
        Settings.parse({**plain, "eval": {"tasks": ["t.jsonl"], "every": 1}})
