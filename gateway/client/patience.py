"""Retries of requests to a gateway: while it has no room, and while it cannot be reached for a moment."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from gateway.client.admin import GatewayRefused

T = TypeVar("T")

_RETRYABLE = (429, 503)
_RETRY_AFTER_S = 1.0
_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 5.0


class GatewayUnreachable(Exception):
    """The gateway gave no answer for too long; the message names the step."""


class Stopped(Exception):
    """A run was stopped while one of its requests waited."""


class Patience:
    """Limits the time without an answer from the gateway (`unreachable_s`)."""

    def __init__(self, unreachable_s: float) -> None:
        self._unreachable_s = unreachable_s
        self._jitter = random.Random()

    async def insist(
        self,
        step: str,
        request: Callable[[], Awaitable[T]],
        stop: asyncio.Event | None = None,
        sent_away: Callable[[GatewayRefused], Awaitable[None]] | None = None,
    ) -> T:
        """Repeats a request until the gateway answers with another status than 429 or 503; `sent_away` is called with each
        of those.

        Raises GatewayRefused, GatewayUnreachable, and Stopped if the gateway sent away a request that began after the run was
        stopped.
        """
        silent_since: float | None = None
        backoff_s = _FIRST_BACKOFF_S
        while True:
            stopped = stop is not None and stop.is_set()
            try:
                return await request()
            except GatewayRefused as refused:
                if refused.status not in _RETRYABLE:
                    raise
                if stopped:
                    raise Stopped from refused
                if sent_away is not None:
                    await sent_away(refused)
                if stop is not None and stop.is_set():  # meanwhile: once more, as at the end of a sleep
                    continue
                silent_since, backoff_s = None, _FIRST_BACKOFF_S
                pause_s = refused.retry_after or _RETRY_AFTER_S
            except httpx.TransportError as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since >= self._unreachable_s:
                    message = f"step '{step}': no answer for {self._unreachable_s:g} s: {error!r}"
                    raise GatewayUnreachable(message) from error
                pause_s, backoff_s = backoff_s, min(2 * backoff_s, _LAST_BACKOFF_S)
            await rest(pause_s * self._jitter.uniform(1.0, 1.5), stop)


async def rest(seconds: float, stop: asyncio.Event | None) -> None:
    """Sleeps until the time is over or the run is stopped, so that a group that was begun gets all its members soon."""
    if stop is None or stop.is_set():
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
