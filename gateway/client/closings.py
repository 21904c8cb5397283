"""Episodes that the gateway closes by itself while their agents run: deadlines, groups that it gives up, people.

Owns one stream of events, from before the first episode is opened. Invariants: a closing is reported however often the stream
breaks, because each stream continues after the one before; a gateway that is gone is reported while no other request is made.
"""

from __future__ import annotations

import asyncio
import logging

import httpx

from gateway.client.admin import GatewayClient, GatewayRefused
from gateway.client.waits import Waits
from processes.slow import SILENT_S

log = logging.getLogger(__name__)

_CLOSED = "episode.closed"
_AGAIN_S = 1.0
_KEPT = ("rewarded",)
"""Reasons of an end that its driver asked for."""


class Closings:
    """The closings among the episodes that are watched. Use `watch` as a task, after `begin`."""

    def __init__(self, client: GatewayClient, model: str | None, waits: Waits) -> None:
        self._client = client
        self._model = model
        self._waits = waits
        self._after: int | None = None
        self._watched: dict[str, asyncio.Future[None]] = {}

    async def begin(self) -> None:
        """Note where the stream is now. Raise GatewayRefused, and httpx's errors if the gateway does not answer."""
        self._after = await self._newest()

    async def _newest(self) -> int | None:
        stream = self._client.events(kinds=[_CLOSED], model=self._model, wait_s=0.0)
        async for _ in stream:
            pass
        return stream.last

    def of(self, episode_id: str) -> asyncio.Future[None]:
        """Return a future that is done once the gateway has closed an episode. `forget` it later."""
        closed = self._watched[episode_id] = asyncio.get_running_loop().create_future()
        return closed

    def forget(self, episode_id: str) -> None:
        """Watch an episode no longer."""
        if (closed := self._watched.pop(episode_id, None)) is not None:
            closed.cancel()

    async def watch(self) -> None:
        """Report closings until cancelled."""
        reported = ""
        while True:
            try:
                await self._read()
            except httpx.TransportError:
                await self._reconnect()
            except GatewayRefused as refused:
                if str(refused) != reported:
                    reported = str(refused)
                    log.warning("the closings of episodes cannot be watched now: %s", refused)
            await asyncio.sleep(_AGAIN_S)

    async def _reconnect(self) -> None:
        """Wait until the gateway responds again. An agent in the middle of its work makes no request that would find it gone."""
        with self._waits.slow(
            f"the gateway at {self._client.url}, which does not respond", SILENT_S, cause=True
        ):
            while True:
                try:
                    await self._newest()
                except httpx.TransportError:
                    await asyncio.sleep(_AGAIN_S)
                except GatewayRefused:
                    return
                else:
                    return

    async def _read(self) -> None:
        stream = self._client.events(self._after, kinds=[_CLOSED], model=self._model)
        try:
            async for event in stream:
                if event["kind"] == "gap":
                    await self._look()
                elif event["data"]["reason"] not in _KEPT:
                    self._close(event["episode"])
        finally:
            self._after = stream.last or self._after

    async def _look(self) -> None:
        """Look at each episode, because events were missed."""
        for episode_id in list(self._watched):
            row = await self._client.episode(episode_id)
            if row["state"] == "closed" and row["reason"] not in _KEPT:
                self._close(episode_id)

    def _close(self, episode_id: str) -> None:
        closed = self._watched.get(episode_id)
        if closed is not None and not closed.done():
            closed.set_result(None)
