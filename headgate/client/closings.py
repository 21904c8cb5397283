"""Episodes that the gateway closes by itself while their agents run: deadlines, groups that it drops, administrators.

Owns one stream of events, from before the first episode is opened. Invariants: a closing is reported however often the stream
breaks, because each stream goes on after the one before; a gateway that stops responding is noticed while all agents run, because
the stream breaks.
"""

from __future__ import annotations

import asyncio
import logging

import httpx

from headgate.client.admin import GatewayClient, GatewayRefused
from headgate.client.retry import RetryPolicy

log = logging.getLogger(__name__)

_CLOSED = "episode.closed"
_PAUSE_S = 1.0
_KEPT = ("rewarded",)
"""Reasons of an end that its driver requested."""


class Closings:
    """The closings among the episodes that are watched. Use `watch` as a task, after `begin`."""

    def __init__(self, client: GatewayClient, model: str | None, retry: RetryPolicy) -> None:
        self._client = client
        self._model = model
        self._retry = retry
        self._after: int | None = None
        self._watched: dict[str, asyncio.Future[None]] = {}

    async def begin(self) -> None:
        """Note where the stream is now. Raise GatewayRefused, and httpx's errors if the gateway does not respond."""
        stream = self._client.events(kinds=[_CLOSED], model=self._model, wait_s=0.0)
        async for _ in stream:
            pass
        self._after = stream.last

    def of(self, episode_id: str) -> asyncio.Future[None]:
        """Return a future that is done once the gateway has closed an episode. `forget` it later."""
        closed = self._watched[episode_id] = asyncio.get_running_loop().create_future()
        return closed

    def forget(self, episode_id: str) -> None:
        """Watch an episode no longer."""
        if (closed := self._watched.pop(episode_id, None)) is not None:
            closed.cancel()

    async def watch(self) -> None:
        """Report closings until cancelled. Raise GatewayUnreachable."""
        reported = ""
        while True:
            try:
                await self._follow()
            except GatewayRefused as refused:
                if str(refused) != reported:
                    reported = str(refused)
                    log.warning("the closings of episodes cannot be watched now: %s", refused)
            await asyncio.sleep(_PAUSE_S)

    async def _follow(self) -> None:
        """Read a stream until it ends. After one that broke, retry until the gateway responds."""
        try:
            await self._read(None)
        except httpx.TransportError:
            await self._retry.call("watch the episodes", lambda: self._read(0.0))

    async def _read(self, wait_s: float | None) -> None:
        stream = self._client.events(self._after, kinds=[_CLOSED], model=self._model, wait_s=wait_s)
        try:
            async for event in stream:
                if event["kind"] == "gap":
                    await self._look()
                elif event["data"]["reason"] not in _KEPT:
                    self._close(event["episode"])
        finally:
            self._after = stream.last or self._after

    async def _look(self) -> None:
        """Read the state of each episode, because events were missed."""
        for episode_id in list(self._watched):
            row = await self._client.episode(episode_id)
            if row["state"] == "closed" and row["reason"] not in _KEPT:
                self._close(episode_id)

    def _close(self, episode_id: str) -> None:
        closed = self._watched.get(episode_id)
        if closed is not None and not closed.done():
            closed.set_result(None)
