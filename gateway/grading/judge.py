"""A model of this gateway that judges: its requests, where they are recorded, and its earlier judgments.

Owns the connections to this gateway and the judgments that are kept. Invariants: each judgment is a call in an evaluation
episode of its own, so it is recorded and never trained; a try that failed ends its episode with a reason; the same text is
judged once, however many episodes of a model have it; a judgment that failed is not kept; a judge's episode is of the judged
model, so it is visible to those who may see that model's episodes, and to no other project.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx

from gateway.grading.base import GradedEpisode, GradingFailed, OwnGateway
from headgate.client import GatewayClient, GatewayRefused
from headgate.types import EpisodeOpened

log = logging.getLogger(__name__)

CHARACTERS = 50_000
"""A judge reads this many characters of a conversation: its end."""
_MARGIN_S = 5.0
FAILED, LATE, UNREADABLE = "judge_failed", "judge_late", "judgment_unreadable"
"""The reasons of a judge's episode that has no judgment: no reply, none in time, or one that is not a judgment."""
_KEPT = 10_000
_PAUSE_S = 0.5
Read = Callable[[str], float]
"""Reads a judgment from a reply. Raise ValueError."""


class Judge:
    """`model`, for the grader `grader`: at most `requests` concurrent requests, each for at most `timeout_s` seconds."""

    def __init__(
        self, model: str, grader: str, gateway: OwnGateway, requests: int, timeout_s: float, max_tokens: int
    ) -> None:
        self._model = model
        self._grader = grader
        self._timeout_s = timeout_s
        self._max_tokens = max_tokens
        self._turns = asyncio.Semaphore(requests)
        self._admin = GatewayClient(gateway.admin_url, gateway.admin_key, timeout_s + _MARGIN_S)
        self._http = httpx.AsyncClient(base_url=gateway.url, timeout=None)
        self._judged: dict[str, asyncio.Task[float]] = {}
        """Judgments by a hash of the judged model and the question, the newest last. Several episodes may wait for one."""

    async def judge(self, episode: GradedEpisode, question: str, read: Read) -> float:
        """Return the judgment of a question about an episode. Raise GradingFailed."""
        key = hashlib.sha256(f"{episode['model']}\n{question}".encode()).hexdigest()
        judging = self._judged.pop(key, None)
        if judging is None:
            work = self._ask(episode, question, read)
            judging = asyncio.create_task(work, name=f"judge-{self._grader}-{key[:8]}")
            judging.add_done_callback(partial(self._forget_failed, key))
        self._judged[key] = judging
        while len(self._judged) > _KEPT:
            self._judged.pop(next(iter(self._judged)))
        return await asyncio.shield(judging)  # another episode may wait for the same

    async def close(self) -> None:
        """Stop running requests, and close connections."""
        running = [judging for judging in self._judged.values() if not judging.done()]
        for judging in running:
            judging.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._admin.close()
        await self._http.aclose()

    def _forget_failed(self, key: str, judging: asyncio.Task[float]) -> None:
        if (judging.cancelled() or judging.exception()) and self._judged.get(key) is judging:
            del self._judged[key]

    async def _ask(self, episode: GradedEpisode, question: str, read: Read) -> float:
        """Keep the judgment as the reward of the judge's own episode; end it with a reason if there is none."""
        opened: EpisodeOpened | None = None
        cause: Exception
        try:
            async with self._turns, asyncio.timeout(self._timeout_s):
                opened = await self._open(episode)
                judged = self._read(await self._reply(opened, question), read)
                await self._admin.reward(opened.episode_id, judged)
                return judged
        except TimeoutError as error:
            reason, detail, cause = LATE, f"was not done within {self._timeout_s:g} s", error
        except (GatewayRefused, httpx.HTTPError) as error:
            reason, detail, cause = FAILED, f"gave no reply: {error!r}", error
        except ValueError as error:
            reason, detail, cause = UNREADABLE, f"gave no judgment: {error}", error
        if opened is not None:
            await self._abandon(opened, reason, detail)
        raise GradingFailed(f"the judge {self._model} {detail}") from cause

    async def _open(self, episode: GradedEpisode) -> EpisodeOpened:
        place = f"judge/{self._grader}", f"judge/{episode['episode_id']}"
        while True:
            try:
                return await self._admin.open_episode(*place, mode="eval", model=episode["model"])
            except httpx.ConnectError:  # after a restart, grading goes on before the gateway listens
                await asyncio.sleep(_PAUSE_S)

    async def _reply(self, opened: EpisodeOpened, question: str) -> Any:
        """Return the judge's response, as the API has it."""
        response = await self._http.post(
            "/v1/chat/completions",
            json={
                "model": self._model,
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": self._max_tokens,
            },
            headers={"Authorization": f"Bearer {opened.api_key}"},
        )
        if response.is_error:
            raise GatewayRefused(response.status_code, response.text[:500], None, None)
        return response.json()

    def _read(self, response: Any, read: Read) -> float:
        """Return the judgment in a response. Raise ValueError if it has none, or was cut short."""
        try:
            choice = response["choices"][0]
            reply: str = choice["message"].get("content") or ""
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"no chat completion: {str(response)[:200]}") from error
        try:
            if choice.get("finish_reason") == "length":
                raise ValueError(f"the reply was cut after max_tokens = {self._max_tokens}")
            return read(reply)
        except ValueError as error:
            raise ValueError(f"{error}: {reply[-200:]!r}") from error

    async def _abandon(self, opened: EpisodeOpened, reason: str, detail: str) -> None:
        """End a judge's own episode, if the gateway lets it; else it ends when it has been idle for long."""
        try:
            async with asyncio.timeout(_MARGIN_S):
                await self._admin.abandon(opened.episode_id, reason, detail)
        except (GatewayRefused, httpx.HTTPError, TimeoutError) as error:
            log.warning("the judge's episode %s stays open: %r", opened.episode_id, error)
