"""Elects the coordinator by a lease in SQL, with a fence that only grows.

A process claims the role immediately if the last coordinator has resigned. Otherwise it waits until it has read an expired lease
twice, with a pause in between, so that the coordinator can renew first after an outage of the database. A coordinator that
finds a successor raises Fenced and must end. Engines have no fence, so a coordinator whose last renewal is older than the lease
must renew it before it commands them (`check_coordinator`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

from gateway.config import ClusterSettings
from gateway.store import coordination
from gateway.store.coordination import Coordinator
from gateway.store.database import Database
from headgate.errors import Fenced, Unavailable

log = logging.getLogger(__name__)

_LOOK_S = 0.3


class Election:
    """One process as a candidate for coordinator."""

    def __init__(self, database: Database, settings: ClusterSettings, name: str, url: str) -> None:
        """`name`: of this process, new with every start. `url`: at which other processes reach it."""
        self._database = database
        self._lease_s = settings.lease_s
        self._name = name
        self._url = url
        self._news = asyncio.Event()
        self._renewed = 0.0
        """The time of the last successful renewal, by the monotonic clock."""

    def coordinator_changed(self) -> None:
        """End the pause before the next check of the lease: another process reports that a coordinator has started or stopped."""
        self._news.set()

    async def _pause(self, seconds: float) -> None:
        """Wait for a time, or until there is news."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    async def seize(self) -> int:
        """Take the lease from any other coordinator; return the fence. For a gateway that is the only process on its store."""
        fence = await self._claim(None)
        assert fence is not None
        return fence

    async def decide(self) -> int | Coordinator:
        """Return this process's fence once it has become the coordinator, or another process that is the coordinator."""
        before = None
        while True:
            try:
                current = await self._database.read(coordination.current)
                if current is not None and current.left_s > 0 and current.holder != self._name:
                    return current
                fence = current.fence if current is not None else 0
                resigned = current is None or current.resigned
                if (fence == before or resigned) and (claimed := await self._claim(fence)) is not None:
                    return claimed
                before = fence
            except Unavailable as error:
                log.warning("no coordinator can be elected now: %s", error)
                before = None
            await self._pause(random.uniform(1.0, 2.0) * _LOOK_S)

    async def _claim(self, over: int | None) -> int | None:
        began = time.monotonic()
        fence = await self._database.submit(
            lambda c: coordination.claim(c, self._name, self._url, self._lease_s, over)
        )
        self._renewed = began
        return fence

    async def hold(self, fence: int) -> None:
        """Renew the lease forever. Raise Fenced once there is a successor."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._renew(fence)
            except Fenced:
                raise
            except Unavailable as error:
                log.warning("the coordinator's lease is not renewed yet: %s", error)

    async def check_coordinator(self, fence: int) -> None:
        """Raise Fenced if this process is no longer the coordinator, Unavailable if that is not known."""
        if time.monotonic() - self._renewed > self._lease_s:
            await self._renew(fence)

    async def _renew(self, fence: int) -> None:
        began = time.monotonic()
        await self._database.submit(lambda c: coordination.renew(c, fence, self._lease_s))
        self._renewed = began

    async def resign(self, fence: int) -> None:
        """End the lease, so that another process can take over immediately."""
        await self._database.submit(lambda c: coordination.resign(c, fence))

    async def changed(self, fence: int) -> None:
        """Return once the coordinator with `fence` no longer holds the lease."""
        while True:
            await self._pause(self._lease_s / 2)
            try:
                current = await self._database.read(coordination.current)
            except Unavailable:
                continue
            if current is None or current.fence != fence or current.left_s < 0:
                return
