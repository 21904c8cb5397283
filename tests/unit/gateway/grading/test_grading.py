"""All graders of a model: weights, tries, and no grade where a part is missing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import GraderSettings
from gateway.config.settings import ConfigError, Settings
from gateway.grading import grading as module
from gateway.grading.base import GradingFailed, Score
from gateway.grading.grading import Grading
from tests.harness.waiting import result_of

MODELS = {"actor": {"path": "a"}, "planner": {"path": "b"}, "judge": {"path": "c", "train": False}}


class Scripted:
    """A grader that returns the given responses, one for each episode; numbers are responses."""

    def __init__(self, *responses: float | Score | GradingFailed) -> None:
        self.responses = list(responses)
        self.episodes: list[dict[str, Any]] = []

    async def grade(self, episode: dict[str, Any]) -> Score:
        self.episodes.append(episode)
        response = self.responses.pop(0)
        if isinstance(response, GradingFailed):
            raise response
        return response if isinstance(response, Score) else Score(response)

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_BACKOFF_S", 0.001)

    async def describe_episode(_database: Any, _renderer: Any, episode_id: str) -> dict[str, Any]:
        return {"episode_id": episode_id, "calls": [{"call_id": "c1"}, {"call_id": "c2"}]}

    monkeypatch.setattr(module, "describe_episode", describe_episode)


def graded_by(graders: dict[str, Scripted], **settings: dict[str, Any]) -> Grading:
    given = {name: GraderSettings(url="http://x", **settings.get(name, {})) for name in graders}
    grading = Grading(given, None, {"actor": None, "planner": None})  # type: ignore[arg-type]
    grading._graders = dict(graders)
    return grading


async def test_the_reward_is_the_weighted_sum() -> None:
    grading = graded_by(
        {"right": Scripted(0.5), "long": Scripted(3.0)}, right={"weight": 2.0}, long={"weight": -0.1}
    )
    grade = await grading.grade("e", "actor")
    assert grade.reward == pytest.approx(2.0 * 0.5 - 0.1 * 3.0)
    assert grade.components == {"right": 0.5, "long": 3.0}


async def test_a_grader_without_an_opinion_adds_nothing() -> None:
    grade = await graded_by({"one": Scripted(Score(None)), "two": Scripted(0.5)}).grade("e", "actor")
    assert (grade.reward, grade.components) == (0.5, {"two": 0.5})
    none = await graded_by({"one": Scripted(Score(None))}).grade("e", "actor")
    assert none.reward is None


async def test_what_calls_earned_is_weighted_and_summed_and_calls_must_be_the_episodes_own() -> None:
    turns, last = Score(3.0, {"c1": 1.0, "c2": 0.5}), Score(1.0, {"c2": 1.0})
    grade = await graded_by({"turns": Scripted(turns), "last": Scripted(last)}, turns={"weight": 0.5}).grade(
        "e", "actor"
    )
    assert (grade.reward, grade.calls) == (2.5, {"c1": 0.5, "c2": 1.25})
    strange = graded_by({"one": Scripted(Score(1.0, {"c3": 1.0}))}, one={"retries": 0})
    with pytest.raises(GradingFailed, match="the episode has no call 'c3'"):
        await strange.grade("e", "actor")


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_a_grader_is_called_as_often_as_allowed_and_no_more(retries: int) -> None:
    late, never = Scripted(*[GradingFailed("x")] * retries, 1.0), Scripted(*[GradingFailed("boom")] * 10)
    settings = {"retries": retries}
    assert (await graded_by({"late": late}, late=settings).grade("e", "actor")).reward == 1.0
    with pytest.raises(GradingFailed, match="never: boom"):
        await graded_by({"never": never}, never=settings).grade("e", "actor")
    assert len(late.episodes) == len(never.episodes) == retries + 1


async def test_a_final_failure_is_not_tried_again() -> None:
    grader = Scripted(GradingFailed("no such thing", final=True), 1.0)
    with pytest.raises(GradingFailed, match="no such thing"):
        await graded_by({"one": grader}).grade("e", "actor")
    assert len(grader.episodes) == 1


async def test_one_grader_that_fails_is_no_grade_and_all_failures_are_named() -> None:
    graders = {
        "good": Scripted(1.0),
        "bad": Scripted(GradingFailed("first", final=True)),
        "worse": Scripted(GradingFailed("second", final=True)),
    }
    with pytest.raises(GradingFailed, match=r"(?s)bad: first.*worse: second"):
        await graded_by(graders).grade("e", "actor")


async def test_neither_a_response_nor_a_sum_may_be_out_of_bounds() -> None:
    with pytest.raises(GradingFailed, match=r"huge: the reward 1e\+308 is not allowed: \[rewards\]"):
        await graded_by({"huge": Scripted(1e308)}, huge={"retries": 0}).grade("e", "actor")
    with pytest.raises(
        GradingFailed, match=r"the weighted sum of .*: the reward 1e\+08 is not allowed: \[rewards\]"
    ):
        await graded_by({"huge": Scripted(1e6)}, huge={"weight": 100.0}).grade("e", "actor")


async def test_a_reward_out_of_bounds_is_requested_again() -> None:
    grade = await graded_by({"judge": Scripted(1e308, 0.5)}, judge={"retries": 1}).grade("e", "actor")
    assert grade.reward == 0.5


async def test_a_model_is_graded_by_its_own_graders() -> None:
    one, every = Scripted(1.0), Scripted(2.0, 2.0)
    grading = graded_by({"one": one, "every": every}, one={"models": ("actor",)})
    assert (await grading.grade("e", "planner")).components == {"every": 2.0}
    assert (await grading.grade("f", "actor")).components == {"one": 1.0, "every": 2.0}
    only = graded_by({"one": Scripted()}, one={"models": ("actor",)})
    assert (only.grades("actor"), only.grades("planner")) == (True, False)
    with pytest.raises(GradingFailed, match="no grader is for the model 'planner'"):
        await only.grade("e", "planner")


async def test_cancelling_a_grade_ends_its_tries() -> None:
    started = asyncio.Event()

    class Endless(Scripted):
        async def grade(self, episode: dict[str, Any]) -> float:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.episodes.append(episode)
            return Score(0.0)

    endless = Endless()
    grading = asyncio.create_task(graded_by({"endless": endless}).grade("e", "actor"))
    await result_of(started.wait(), "the grader has begun")
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    assert len(endless.episodes) == 1


async def test_a_function_that_cannot_be_imported_is_refused_at_the_start() -> None:
    settings = {"mine": GraderSettings(function="tests.harness.graders:missing")}
    with pytest.raises(ConfigError, match=r"\[graders\.mine\] function: .*cannot be imported"):
        await Grading.open(settings, None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graders", "words"),
    [
        ({"g": {}}, "one of `function`, `url` and `judge`"),
        ({"g": {"url": "http://x", "function": "a:b"}}, "one of `function`, `url` and `judge`"),
        ({"g": {"url": "http://x", "models": ["judge"]}}, "there is no trained model 'judge'"),
        ({"g": {"url": "http://x", "models": ["none"]}}, "there is no trained model 'none'"),
        ({"calls": {"url": "http://x"}}, "posted on calls"),
        ({"g": {"url": "file:///etc/passwd"}}, "url"),
        ({"g": {"judge": "actor", "criteria": {"a": "b"}}}, "'actor' is not a model with train = false"),
        ({"g": {"judge": "none", "reference_key": "b"}}, "'none' is not a model with train = false"),
        ({"g": {"judge": "judge"}}, "needs `criteria` to score by, or a `reference_key`"),
        ({"g": {"judge": "judge", "reference_key": "b", "each_turn": True}}, "are for `criteria`, not"),
        ({"g": {"url": "http://x", "criteria": {"a": "b"}}}, "are for a `judge`"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(graders: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings.parse({"models": MODELS, "graders": graders})
