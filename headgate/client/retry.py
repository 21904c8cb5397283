"""Retries of requests to a gateway: while it has no room, and while it does not respond for a moment.

Owns the report of an outage: one for all requests of a run, with the gateway's URL and its duration. Invariant: a request
fails after `unreachable_s` without a response.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from headgate.client.admin import GatewayRefused
from headgate.client.refusal import cause_of
from headgate.client.waits import Waits
from headgate.processes.slow import SILENT_S

T = TypeVar("T")

_RETRYABLE = (429, 503)
_RETRY_AFTER_S = 1.0
_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 5.0
_CLOCK_S = 0.01
"""A timer of the event loop may run early by the resolution of its clock."""


class GatewayUnreachable(Exception):
    """The gateway gave no response for too long; the message names its URL and the step."""


class Stopped(Exception):
    """A run was stopped while one of its requests waited."""


class RetryPolicy:
    """Repeats requests to the gateway at `url`, limits the time without a response, and reports it to `waits`."""

    def __init__(self, url: str, unreachable_s: float, waits: Waits) -> None:
        self._url = url
        self._unreachable_s = unreachable_s
        self._waits = waits
        self._jitter = random.Random()
        self._outages: dict[object, float] = {}
        """When each request that has no response failed first."""

    async def call(
        self,
        step: str,
        request: Callable[[], Awaitable[T]],
        stop: asyncio.Event | None = None,
        on_refusal: Callable[[GatewayRefused], Awaitable[None]] | None = None,
        slow_s: float = SILENT_S,
    ) -> T:
        """Repeat a request until its status is neither 429 nor a 503 that passes; call `on_refusal` with each of those.

        A single request that takes longer than `slow_s` is reported. Raise GatewayRefused, GatewayUnreachable, and Stopped if
        the gateway refused a request that began after the run was stopped.
        """
        caller = object()

        async def note(refused: GatewayRefused) -> None:
            self._waits.set(caller, refused.message)

        try:
            return await self._call(step, request, stop, on_refusal or note, caller, slow_s)
        finally:
            self._waits.set(caller, "")
            self._end_outage(caller)

    async def _call(
        self,
        step: str,
        request: Callable[[], Awaitable[T]],
        stop: asyncio.Event | None,
        on_refusal: Callable[[GatewayRefused], Awaitable[None]],
        caller: object,
        slow_s: float,
    ) -> T:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            stopped = stop is not None and stop.is_set()
            try:
                with self._waits.slow(f"the gateway at {self._url} to respond (step '{step}')", slow_s):
                    return await request()
            except GatewayRefused as refused:
                self._end_outage(caller)
                if refused.status not in _RETRYABLE or refused.lasts:
                    raise
                if stopped:
                    raise Stopped from refused
                await on_refusal(refused)
                if stop is not None and stop.is_set():  # one more request, as after the pause
                    continue
                backoff_s = _FIRST_BACKOFF_S
                pause_s = refused.retry_after or _RETRY_AFTER_S
            except httpx.TransportError as error:
                self._note_outage(caller, step, error)
                pause_s, backoff_s = backoff_s, min(2 * backoff_s, _LAST_BACKOFF_S)
            await sleep_or_stop(pause_s * self._jitter.uniform(1.0, 1.5), stop)

    def _note_outage(self, caller: object, step: str, error: httpx.TransportError) -> None:
        """Report an outage once it has lasted `SILENT_S`. Raise GatewayUnreachable once it has lasted too long."""
        since = self._outages.setdefault(caller, time.monotonic())
        if time.monotonic() - since >= self._unreachable_s:
            raise GatewayUnreachable(
                f"the gateway at {self._url} has not responded for {self._unreachable_s:g} s ({cause_of(error)}; step '{step}'):"
                " start it again, then this run"
            ) from error
        self._report_outage()
        if time.monotonic() - since < SILENT_S:
            delay_s = since + SILENT_S - time.monotonic() + _CLOCK_S
            asyncio.get_running_loop().call_later(delay_s, self._report_outage)

    def _report_outage(self) -> None:
        silent_s = time.monotonic() - min(self._outages.values(), default=time.monotonic())
        reported = self._outages and silent_s >= SILENT_S
        text = (
            f"the gateway at {self._url}, which has not responded for {silent_s:.0f} s; the run ends after"
            f" {self._unreachable_s:g} s"
        )
        self._waits.set(self, text if reported else "", urgent=True)

    def _end_outage(self, caller: object) -> None:
        if self._outages.pop(caller, None) is not None and not self._outages:
            self._report_outage()


async def sleep_or_stop(seconds: float, stop: asyncio.Event | None) -> None:
    """Sleep until the time is over or the run is stopped, so that a started group gets all its members soon."""
    if stop is None or stop.is_set():
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
