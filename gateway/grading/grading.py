"""All graders of the configuration, with their retries.

Owns the graders. Invariant: a grade has the answers of all of the model's graders, or there is none: a partial sum would be
wrong.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from gateway.grading.base import Grader, GradingFailed
from gateway.grading.episode_view import describe_episode
from gateway.grading.function import FunctionGrader
from gateway.render.renderer import ChatRenderer
from gateway.sections import GraderSettings, RewardSettings
from gateway.settings import ConfigError
from gateway.store.database import Database

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 30.0
_READS = 8
"""Episodes that are read from the store at once: it has other readers."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The weighted sum, and what each grader answered."""

    reward: float
    components: dict[str, float]


class Grading:
    """Open it with `open`, close it with `close`."""

    def __init__(
        self,
        settings: Mapping[str, GraderSettings],
        database: Database,
        renderers: Mapping[str, ChatRenderer],
        rewards: RewardSettings | None = None,
    ) -> None:
        """`rewards`: between which numbers an answer is a reward."""
        self._settings = settings
        self._rewards = rewards or RewardSettings()
        self._database = database
        self._renderers = renderers
        self._reads = asyncio.Semaphore(_READS)
        self._graders = {name: _grader(given) for name, given in settings.items()}

    @classmethod
    async def open(
        cls,
        settings: Mapping[str, GraderSettings],
        database: Database,
        renderers: Mapping[str, ChatRenderer],
        rewards: RewardSettings | None = None,
    ) -> Self:
        """`renderers`: of every model. Raises ConfigError if a function cannot be imported."""
        grading = cls(settings, database, renderers, rewards)
        try:
            await asyncio.gather(*(grading._check(name) for name in settings))
        except BaseException:
            await grading.close()
            raise
        return grading

    async def close(self) -> None:
        """Ends the graders."""
        await asyncio.gather(*(grader.close() for grader in self._graders.values()))

    def grades(self, model: str) -> bool:
        """True if a model's episodes have a grader."""
        return bool(self._names(model))

    async def grade(self, episode_id: str, model: str) -> Grade:
        """The grade of a stored episode. Raises GradingFailed, which says what every grader that failed said."""
        names = self._names(model)
        if not names:
            raise GradingFailed(f"[graders]: no grader is for the model {model!r}", final=True)
        async with self._reads:
            episode = await describe_episode(self._database, self._renderers[model], episode_id)
        answers = await asyncio.gather(*(self._ask(name, episode) for name in names), return_exceptions=True)
        components: dict[str, float] = {}
        failures: list[str] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, GradingFailed):
                failures.append(f"{name}: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                components[name] = answer
        if failures:
            raise GradingFailed("\n".join(failures))
        total = sum(self._settings[name].weight * answer for name, answer in components.items())
        if refusal := self._rewards.refusal(total):
            raise GradingFailed(f"the weighted sum of {components}: {refusal}")
        return Grade(total, components)

    async def _ask(self, name: str, episode: dict[str, Any]) -> float:
        tries, backoff_s = 1 + self._settings[name].retries, _FIRST_BACKOFF_S
        while True:
            tries -= 1
            try:
                answer = await self._graders[name].grade(episode)
                if refusal := self._rewards.refusal(answer):
                    raise GradingFailed(refusal)
                return answer
            except GradingFailed as error:
                if error.final or not tries:
                    raise
                log.warning("grader %s, episode %s, is tried again: %s", name, episode["episode_id"], error)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _check(self, name: str) -> None:
        grader = self._graders[name]
        if isinstance(grader, FunctionGrader):
            try:
                await grader.check()
            except GradingFailed as error:
                raise ConfigError(f"[graders.{name}] function: {error}") from error

    def _names(self, model: str) -> list[str]:
        return [
            name for name, given in self._settings.items() if given.models is None or model in given.models
        ]


def _grader(given: GraderSettings) -> Grader:
    if given.url is not None:
        from gateway.grading.url import UrlGrader  # httpx brings rich and pygments with it

        return UrlGrader(given.url, given.workers, given.timeout_s)
    assert given.function is not None
    return FunctionGrader(given.function, given.workers, given.timeout_s)
