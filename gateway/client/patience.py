"""Retries of requests to a gateway: while it has no room, and while it cannot be reached for a moment."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from gateway.client.admin import GatewayRefused
from gateway.client.waits import Waits
from processes.slow import SILENT_S

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
    """Limits the time without an answer from the gateway (`unreachable_s`), and reports it to `waits`."""

    def __init__(self, unreachable_s: float, waits: Waits) -> None:
        self._unreachable_s = unreachable_s
        self._waits = waits
        self._jitter = random.Random()

    async def insist(
        self,
        step: str,
        request: Callable[[], Awaitable[T]],
        stop: asyncio.Event | None = None,
        sent_away: Callable[[GatewayRefused], Awaitable[None]] | None = None,
        slow_s: float = SILENT_S,
    ) -> T:
        """Repeat a request until the gateway answers with another status than 429 or a 503 that passes; `sent_away` is called
        with each of those. What takes longer than `slow_s` is reported.

        Raise GatewayRefused, GatewayUnreachable, and Stopped if the gateway sent away a request that began after the run was
        stopped.
        """
        who = object()

        async def note(refused: GatewayRefused) -> None:
            self._waits.set(who, refused.message)

        try:
            return await self._insist(step, request, stop, sent_away or note, who, slow_s)
        finally:
            self._waits.set(who, "")

    async def _insist(
        self,
        step: str,
        request: Callable[[], Awaitable[T]],
        stop: asyncio.Event | None,
        sent_away: Callable[[GatewayRefused], Awaitable[None]],
        who: object,
        slow_s: float,
    ) -> T:
        silent_since: float | None = None
        backoff_s = _FIRST_BACKOFF_S
        silence = f"the gateway to answer (step '{step}')"
        while True:
            stopped = stop is not None and stop.is_set()
            try:
                with self._waits.slow(silence, slow_s):
                    return await request()
            except GatewayRefused as refused:
                if refused.status not in _RETRYABLE or refused.lasts:
                    raise
                if stopped:
                    raise Stopped from refused
                await sent_away(refused)
                if stop is not None and stop.is_set():  # meanwhile: once more, as at the end of a sleep
                    continue
                silent_since, backoff_s = None, _FIRST_BACKOFF_S
                pause_s = refused.retry_after or _RETRY_AFTER_S
            except httpx.TransportError as error:
                silent_since = silent_since or time.monotonic()
                silent_s = time.monotonic() - silent_since
                if silent_s >= self._unreachable_s:
                    message = f"step '{step}': no answer for {self._unreachable_s:g} s: {error!r}"
                    raise GatewayUnreachable(message) from error
                if silent_s >= SILENT_S:
                    self._waits.set(who, silence)
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
