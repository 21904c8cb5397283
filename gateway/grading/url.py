"""A URL as a grader: the episode is posted there as JSON, and returns `{"reward": number}`.

The address comes from the administrator's configuration alone, never from a request.
"""

from __future__ import annotations

import asyncio

import httpx
import orjson

from gateway.grading.base import GradedEpisode, GradingFailed, Score, score_of
from headgate.json_depth import loads

_TOO_MANY = 429


class UrlGrader:
    """`url`, with at most `requests` concurrent requests; an attempt takes at most `timeout_s` seconds."""

    def __init__(self, url: str, requests: int, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(requests)
        limits = httpx.Limits(max_connections=requests, keepalive_expiry=4.0)
        self._http = httpx.AsyncClient(
            timeout=None, limits=limits, headers={"content-type": "application/json"}
        )

    async def grade(self, episode: GradedEpisode) -> Score:
        """Query the URL. A response that another try would not change is final: a redirection, and every 4xx but 429."""
        content = orjson.dumps(episode)
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._http.post(self._url, content=content)
            except TimeoutError as error:
                raise GradingFailed(f"{self._url} did not respond within {self._timeout_s:g} s") from error
            except httpx.HTTPError as error:
                raise GradingFailed(f"{self._url}: {error!r}") from error
        if not response.is_success:
            retryable = response.is_server_error or response.status_code == _TOO_MANY
            raise GradingFailed(
                f"{self._url} responded with {response.status_code}: {response.text[:500]}",
                final=not retryable,
            )
        return self._reward(response)

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()

    def _reward(self, response: httpx.Response) -> Score:
        try:
            score = loads(response.content)
            if not isinstance(score, dict):
                raise ValueError('no object with "reward"')
            return score_of(score)
        except ValueError as error:
            raise GradingFailed(f"{self._url} responded with {response.text[:200]!r}: {error}") from error
