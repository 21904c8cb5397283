"""The teacher of `[distill]`: a server that scores the sampled tokens of a batch's groups as they arrive.

One request for each path of an episode's tree, in vLLM's form (`prompt_logprobs`). Invariants: a group is trained only with the
scores of all tokens that it trains; a teacher that is unavailable delays a batch, and nothing of it is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from headgate.http import ERRORS, Session, headers_with
from headgate.types import Episode, Float32Array, Group
from trainer.config.distill import DistillSettings
from trainer.data.tree import Row, rows_of
from trainer.errors import ConfigError, StepTimeout, TrainerError

RETRY_S = 0.5
_REPORT_AFTER_S = 2.0
_REQUEST_S = 600.0
_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT)
_PROBE = 'The quick brown fox: 12345 + 0.5 = "naïve café"\n\tif x >= 0 { return [Ω, 東京, 🙂] }'
"""Text that tokenizers cut differently."""


class Teacher:
    """One teacher's server."""

    def __init__(self, settings: DistillSettings, notify: Callable[[str], None] = print) -> None:
        """`notify` reports to the user why the trainer waits."""
        self._settings = settings
        self._url = settings.url.rstrip("/")
        self._notify = notify
        key = None if settings.key is None else settings.key.get_secret_value()
        self._session = Session(headers_with(key), total_s=_REQUEST_S)
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def check(self, model: Path) -> None:
        """Raise ConfigError if the teacher's tokenizer is not that of the trained model's folder."""
        tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, str(model), local_files_only=True)
        own = tokenizer.encode(_PROBE, add_special_tokens=False)
        body = {"model": self._settings.model, "prompt": _PROBE, "add_special_tokens": False}
        theirs = (await self._post(f"{self._url.removesuffix('/v1')}/tokenize", body)).get("tokens")
        if theirs != own:
            raise ConfigError(
                f"[distill] model = {self._settings.model!r} has another tokenizer than {model}: a teacher scores the tokens that"
                " the trained model sampled, so both need the same one"
            )

    async def score(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups with `Node.teacher` of all tokens that are trained. Raise StepTimeout, TrainerError."""
        episodes = [episode for group in groups for episode in group.episodes]
        scored = iter(await asyncio.gather(*map(self._scored, episodes)))
        return tuple(replace(group, episodes=tuple(next(scored) for _ in group.episodes)) for group in groups)

    async def _scored(self, episode: Episode) -> Episode:
        rows = rows_of([(episode, {})]).rows
        found = await asyncio.gather(*map(self._logprobs, rows))
        values: dict[int, Float32Array] = {
            node.index: np.full(len(node.ids), np.nan, np.float32) for node in episode.nodes if node.sampled
        }
        for row, logprobs in zip(rows, found, strict=True):
            for node in np.unique(row.nodes[row.train]).tolist():
                places = (row.nodes == node).nonzero()[0]
                trained = row.train[places]
                values[node][: len(places)][trained] = logprobs[places[trained]]
        nodes = (replace(node, teacher=values.get(node.index)) for node in episode.nodes)
        return replace(episode, nodes=tuple(nodes))

    async def _logprobs(self, row: Row) -> npt.NDArray[np.float64]:
        """Return the teacher's log-probability of each token of a row, shape (tokens,), nats; NaN for the first."""
        ids = row.ids.tolist()
        body = {"model": self._settings.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        async with self._slots:
            answer = await self._post(f"{self._url}/completions", body)
        try:
            (choice,) = answer["choices"]
            every = choice["prompt_logprobs"]
            scores = [value[str(token)]["logprob"] for token, value in zip(ids[1:], every[1:], strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise TrainerError(
                f"[distill]: {self._url} returned no log-probabilities of the prompt ({type(error).__name__}: {error}): the"
                " teacher's server must be vLLM's"
            ) from error
        return np.array([np.nan, *scores])

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Repeat a request while the teacher is unavailable, until `timeout_s`."""
        began, reported = time.monotonic(), False
        while True:
            try:
                async with self._session.request("POST", url, json=body) as answer:
                    if answer.status == HTTPStatus.OK:
                        found: dict[str, Any] = await answer.json(content_type=None)
                        return found
                    reason = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                    if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status not in _LATER:
                        raise TrainerError(f"[distill]: the teacher at {url} refuses: {reason}")
            except (*ERRORS, aiohttp.ContentTypeError) as error:
                reason = f"{type(error).__name__}: {error}"
            waited = time.monotonic() - began
            if waited + RETRY_S > self._settings.timeout_s:
                raise StepTimeout("teacher", self._settings.timeout_s, reason)
            if waited > _REPORT_AFTER_S and not reported:
                reported = True
                self._notify(f"waiting for the teacher, up to {self._settings.timeout_s:g} s: {reason}")
            await asyncio.sleep(RETRY_S)


async def scored(teacher: Teacher | None, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return groups with the teacher's scores, if there is one."""
    return groups if teacher is None else await teacher.score(groups)
