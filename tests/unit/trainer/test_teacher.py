"""A teacher's scores: requested over HTTP, given to the tokens that were sampled, and added to their advantages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from headgate.types import Episode, Group, TokenFlag
from tests.harness.gateways import run_gateway, settings_for
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, offline_settings, settings_of, train_one
from tests.unit.trainer.trees import prompt, sampled
from trainer.algorithms.grpo import GrpoSettings
from trainer.config.distill import DistillSettings
from trainer.data.batch import Batch
from trainer.errors import ConfigError, FeedBroken, StepTimeout, TrainerError
from trainer.loop.agreement import check_teacher
from trainer.loop.teacher import Teacher


class FakeTeacher:
    """vLLM's two routes; the log-probability of a token is a function of it and of its position."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(model))
        self.failures: list[int] = []
        """Statuses of the next responses."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": self.tokenizer.encode(text, add_special_tokens=False)})

    async def completions(self, request: web.Request) -> web.Response:
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="of a test")
        body = await request.json()
        assert (body["model"], body["prompt_logprobs"]) == ("big", 0)
        scores: list[Any] = [{str(t): {"logprob": score(t, i)}} for i, t in enumerate(body["prompt"])]
        return web.json_response({"choices": [{"prompt_logprobs": [None, *scores[1:]]}]})


def score(token: int, position: int) -> float:
    return -0.25 * (token % 5) - 0.125 * position


@pytest.fixture
async def fake(tiny_model: Path) -> AsyncIterator[tuple[FakeTeacher, str]]:
    teacher = FakeTeacher(tiny_model)
    async with TestServer(teacher.app()) as server:
        yield teacher, str(server.make_url("/v1"))


def distill(url: str = "http://127.0.0.1:1/v1", **given: Any) -> DistillSettings:
    return DistillSettings.model_validate({"url": url, "model": "big", **given})


def tree() -> Episode:
    """Two branches behind a common first turn, whose first token is not trained."""
    flags = [TokenFlag.GREEDY, 0, 0]
    nodes = (
        prompt(0, -1, 0, [1, 2, 3]),
        sampled(1, 0, 3, [4, 5, 6], flags=flags, logprob=-0.5),
        prompt(2, 1, 3, [7]),
        sampled(3, 2, 1, [8, 9], logprob=-0.5),
        prompt(4, 1, 2, [10, 11]),
        sampled(5, 4, 2, [12], logprob=-0.5),
    )
    return Episode("e", 1.0, nodes)


TAUGHT = {
    1: [np.nan, score(5, 4), score(6, 5)],
    3: [score(8, 7), score(9, 8)],
    5: [score(12, 7)],
}


async def test_every_trained_token_has_the_teachers_score_of_its_own_path(
    fake: tuple[FakeTeacher, str],
) -> None:
    server, url = fake
    teacher = Teacher(distill(url))
    server.failures = [503, 429]
    (scored,) = await teacher.score([Group("g", "t", 0, (tree(), Episode("none", 0.0, ())))])
    await teacher.close()
    found = {node.index: node.teacher for node in scored.episodes[0].nodes if node.sampled}
    assert found.keys() == TAUGHT.keys()
    for index, expected in TAUGHT.items():
        np.testing.assert_allclose(found[index], expected, rtol=1e-6)


def scored_tree(reward: float = 1.0) -> Episode:
    nodes = (
        replace(node, teacher=np.array(TAUGHT[node.index], np.float32)) if node.sampled else node
        for node in tree().nodes
    )
    return replace(tree(), reward=reward, nodes=tuple(nodes))


@pytest.mark.parametrize("reward_weight", [0.0, 0.5])
def test_the_reverse_kl_is_added_to_the_advantage_of_each_token(reward_weight: float) -> None:
    settings = distill(weight=2.0, reward_weight=reward_weight, cap=0.7)
    algorithm = GrpoSettings(normalize_std=False).create()
    batch = Batch(0, algorithm, 100, distill=settings)
    pair = (scored_tree(), replace(scored_tree(0.0), episode_id="f"))
    (micro,) = [*batch.add_groups([Group("g", "t", 0, pair)]), *batch.minibatches()[0].micros]
    gaps = [s + 0.5 for index in (1, 3, 5) for s in TAUGHT[index] if not np.isnan(s)]
    for episode, earned in ((0, 0.5), (1, -0.5)):
        found = micro.advantages[micro.sequences == episode].tolist()
        expected = [reward_weight * earned + 2 * max(-0.7, min(0.7, gap)) for gap in gaps]
        assert sorted(found) == pytest.approx(sorted(expected))
    assert batch.measured()["kl_teacher_k1"] == pytest.approx(-sum(gaps) / len(gaps))


def test_groups_of_equal_rewards_are_trained_and_other_temperatures_refused() -> None:
    algorithm = GrpoSettings().create()
    batch = Batch(0, algorithm, 100, distill=distill())
    list(batch.add_groups([Group("g", "t", 0, (scored_tree(),))]))
    assert (batch.trained, batch.skipped) == (5, 0)
    nodes = tuple(replace(node, temperature=0.5) for node in scored_tree().nodes)
    hot = Group("h", "t", 0, (replace(scored_tree(), nodes=nodes),))
    with pytest.raises(FeedBroken, match=r"scores at 1: set \[sampling\]"):
        list(Batch(0, algorithm, 100, distill=distill()).add_groups([hot]))


def test_a_model_that_sees_images_has_no_teacher(tiny_model: Path, tmp_path: Path) -> None:
    settings = offline_settings(tiny_model, tmp_path, distill={"url": "http://a", "model": "big"})
    check_teacher(settings, sees_images=False)
    with pytest.raises(ConfigError, match="scores text alone"):
        check_teacher(settings, sees_images=True)


async def test_a_teacher_that_cannot_teach_is_named(fake: tuple[FakeTeacher, str], tmp_path: Path) -> None:
    server, url = fake
    teacher, one = Teacher(distill(url, timeout_s=0.1)), [Group("g", "t", 0, (tree(),))]
    server.failures = [400] * 2
    with pytest.raises(TrainerError, match="refuses: HTTP 400: of a test"):
        await teacher.score(one)
    server.failures = [500] * 9
    with pytest.raises(StepTimeout, match="HTTP 500"):
        await teacher.score(one)
    server.tokenizer = type(server.tokenizer).from_pretrained(server.tokenizer.name_or_path)
    server.tokenizer.add_tokens(["fox"])
    with pytest.raises(ConfigError, match="another tokenizer than"):
        await teacher.check(Path(server.tokenizer.name_or_path))
    await teacher.close()


@pytest.mark.parametrize("drop_equal", [False, True])
async def test_a_run_learns_from_a_teacher(
    fake: tuple[FakeTeacher, str], tiny_model: Path, tmp_path: Path, drop_equal: bool
) -> None:
    staleness = {"batch": 2, "eta": 1, "min_members": 1, "drop_equal": drop_equal}
    given = settings_for(tiny_model, tmp_path, staleness=staleness, update={"probe": False})
    async with run_gateway(given) as gateway, episodes(gateway):
        settings = settings_of(gateway, tiny_model, tmp_path).model_copy(
            update={"distill": distill(fake[1], reward_weight=0.0)}
        )
        if drop_equal:
            with pytest.raises(ConfigError, match="drop_equal = false"):
                async with loop_of(gateway, settings):
                    pass
            return
        async with loop_of(gateway, settings) as loop:
            before = [p.clone() for p in loop.trainer.model.parameters()]
            await train_one(loop)
            assert any((a != b).any() for a, b in zip(before, loop.trainer.model.parameters(), strict=True))
