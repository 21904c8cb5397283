"""All graders of the configuration, with their retries.

Owns the graders. Invariant: a grade has the scores of all of the model's graders, or there is none: a partial sum would be
wrong. A grader without an opinion (None) adds nothing to the sum; if none has one, there is no reward.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from gateway.config import GraderSettings, RewardSettings
from gateway.config.settings import ConfigError
from gateway.grading.base import NOWHERE, GradedEpisode, Grader, GradingFailed, OwnGateway, Score
from gateway.grading.episode_view import describe_episode
from gateway.grading.function import FunctionGrader
from gateway.render.renderer import ChatRenderer
from gateway.store.database import Database

if TYPE_CHECKING:
    from gateway.grading.judge import Judge

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 30.0
_READS = 8
"""How many episodes are read from the store concurrently: it has other readers."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The weighted sum, and each grader's score."""

    reward: float | None
    """The whole, `calls` included. None: no grader has an opinion."""
    components: dict[str, float]
    calls: dict[str, float] = field(default_factory=dict)
    """The weighted sums of what single calls earned."""


class Grading:
    """Open it with `open`, close it with `close`."""

    def __init__(
        self,
        settings: Mapping[str, GraderSettings],
        database: Database,
        renderers: Mapping[str, ChatRenderer],
        rewards: RewardSettings | None = None,
        gateway: OwnGateway = NOWHERE,
    ) -> None:
        """`rewards`: the range of valid rewards. `gateway`: where judges send their requests."""
        self._settings = settings
        self._rewards = rewards or RewardSettings()
        self._database = database
        self._renderers = renderers
        self._reads = asyncio.Semaphore(_READS)
        self._graders = {name: FORMS[grader.form](name, grader, gateway) for name, grader in settings.items()}

    @classmethod
    async def open(
        cls,
        settings: Mapping[str, GraderSettings],
        database: Database,
        renderers: Mapping[str, ChatRenderer],
        rewards: RewardSettings | None = None,
        gateway: OwnGateway = NOWHERE,
    ) -> Self:
        """Return `renderers`: of every model. Raise ConfigError if a function cannot be imported."""
        grading = cls(settings, database, renderers, rewards, gateway)
        try:
            await asyncio.gather(*(grading._start(name) for name in settings))
        except BaseException:
            await grading.close()
            raise
        return grading

    async def close(self) -> None:
        """End the graders."""
        await asyncio.gather(*(grader.close() for grader in self._graders.values()))

    def grades(self, model: str) -> bool:
        """Return true if a model's episodes have a grader."""
        return bool(self._names(model))

    async def grade(self, episode_id: str, model: str) -> Grade:
        """Return the grade of a stored episode. Raise GradingFailed with the error of every grader that failed."""
        names = self._names(model)
        if not names:
            raise GradingFailed(f"[graders]: no grader is for the model {model!r}", final=True)
        async with self._reads:
            episode = await describe_episode(self._database, self._renderers[model], episode_id)
        scores = await asyncio.gather(*(self._ask(name, episode) for name in names), return_exceptions=True)
        found: dict[str, Score] = {}
        failures: list[str] = []
        for name, score in zip(names, scores, strict=True):
            if isinstance(score, GradingFailed):
                failures.append(f"{name}: {score}")
            elif isinstance(score, BaseException):
                raise score
            else:
                found[name] = score
        if failures:
            raise GradingFailed("\n".join(failures))
        return self._sum(found)

    def _sum(self, scores: Mapping[str, Score]) -> Grade:
        components = {name: score.reward for name, score in scores.items() if score.reward is not None}
        if not components:
            return Grade(None, {})
        total, calls = 0.0, Counter[str]()
        for name, score in scores.items():
            weight = self._settings[name].weight
            total += weight * (score.reward or 0.0)
            for call, earned in score.calls.items():
                calls[call] += weight * earned  # type: ignore[assignment]
        if refusal := self._rewards.refusal(total):
            raise GradingFailed(f"the weighted sum of {components}: {refusal}")
        return Grade(total, components, dict(calls))

    async def _ask(self, name: str, episode: GradedEpisode) -> Score:
        tries, backoff_s = 1 + self._settings[name].retries, _FIRST_BACKOFF_S
        while True:
            tries -= 1
            try:
                score = await self._graders[name].grade(episode)
                self._check(score, episode)
                return score
            except GradingFailed as error:
                if error.final or not tries:
                    raise
                log.warning("grader %s, episode %s, is tried again: %s", name, episode["episode_id"], error)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    def _check(self, score: Score, episode: GradedEpisode) -> None:
        """Raise GradingFailed for rewards out of bounds, and for rewards of calls that the episode does not have."""
        for reward in () if score.reward is None else (score.reward, *score.calls.values()):
            if refusal := self._rewards.refusal(reward):
                raise GradingFailed(refusal)
        if score.calls and (strange := score.calls.keys() - {call["call_id"] for call in episode["calls"]}):
            raise GradingFailed(f"the episode has no call {min(strange)!r}")

    async def _start(self, name: str) -> None:
        grader = self._graders[name]
        if isinstance(grader, FunctionGrader):
            try:
                await grader.check()
            except GradingFailed as error:
                raise ConfigError(f"[graders.{name}] function: {error}") from error

    def _names(self, model: str) -> list[str]:
        return [
            name for name, grader in self._settings.items() if grader.models is None or model in grader.models
        ]


def _function(name: str, settings: GraderSettings, gateway: OwnGateway) -> Grader:
    assert settings.function is not None
    return FunctionGrader(settings.function, settings.workers, settings.timeout_s)


def _url(name: str, settings: GraderSettings, gateway: OwnGateway) -> Grader:
    from gateway.grading.url import UrlGrader  # httpx brings rich and pygments with it

    assert settings.url is not None
    return UrlGrader(settings.url, settings.workers, settings.timeout_s)


def _rubric(name: str, settings: GraderSettings, gateway: OwnGateway) -> Grader:
    from gateway.grading.rubric import RubricGrader

    return RubricGrader(
        _judge(name, settings, gateway), settings.criteria, settings.each_turn, settings.next_turn
    )


def _pairwise(name: str, settings: GraderSettings, gateway: OwnGateway) -> Grader:
    from gateway.grading.pairwise import PairwiseGrader

    return PairwiseGrader(
        _judge(name, settings, gateway), settings.reference_key, " ".join(settings.criteria.values())
    )


def _judge(name: str, settings: GraderSettings, gateway: OwnGateway) -> Judge:
    from gateway.grading.judge import Judge

    assert settings.judge is not None
    return Judge(settings.judge, name, gateway, settings.workers, settings.timeout_s, settings.max_tokens)


FORMS: Mapping[str, Callable[[str, GraderSettings, OwnGateway], Grader]] = {
    "function": _function,
    "url": _url,
    "rubric": _rubric,
    "pairwise": _pairwise,
}
"""The function that makes a grader of each form, from its name and settings."""
