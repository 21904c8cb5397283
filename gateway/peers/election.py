"""Which process is the coordinator: a lease in SQL, with a fence that only grows.

A process claims the place when it has seen the lease of the last one expired, more than once and a while apart: after the
database itself was away, the holder's renewal comes first. The holder that learns of a successor raises Fenced, and must end.
"""

from __future__ import annotations

import asyncio
import logging
import random

from gateway.settings import ClusterSettings
from gateway.store import coordination
from gateway.store.coordination import Coordinator
from gateway.store.database import Database

log = logging.getLogger(__name__)

_LOOK_S = 0.3


class Election:
    """One process's part in it."""

    def __init__(self, database: Database, settings: ClusterSettings, name: str, url: str) -> None:
        """`name`: of this process, new with every start. `url`: where the others reach it."""
        self._database = database
        self._lease_s = settings.lease_s
        self._name = name
        self._url = url

    async def seize(self) -> int:
        """Becomes the coordinator, whoever it is now; answers the fence. For a gateway that is alone on its store."""
        fence = await self._database.submit(
            lambda c: coordination.claim(c, self._name, self._url, self._lease_s, None)
        )
        assert fence is not None
        return fence

    async def decide(self) -> int | Coordinator:
        """This process's fence, once it has become the coordinator; or another one that is."""
        before = None
        while True:
            seen = await self._database.read(coordination.current)
            if seen is not None and seen.left_s > 0 and seen.holder != self._name:
                return seen
            fence = seen.fence if seen is not None else 0
            if fence == before or seen is None:
                claimed = await self._claim(fence)
                if claimed is not None:
                    return claimed
            before = fence
            await asyncio.sleep(random.uniform(1.0, 2.0) * _LOOK_S)

    async def _claim(self, over: int) -> int | None:
        return await self._database.submit(
            lambda c: coordination.claim(c, self._name, self._url, self._lease_s, over)
        )

    async def hold(self, fence: int) -> None:
        """Renews the lease for ever. Raises Fenced once there is a successor."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._database.submit(lambda c: coordination.renew(c, fence, self._lease_s))

    async def resign(self, fence: int) -> None:
        """Another process may follow at once."""
        await self._database.submit(lambda c: coordination.resign(c, fence))

    async def changed(self, fence: int) -> None:
        """Returns once somebody else than the coordinator with `fence` has the place, or may take it."""
        while True:
            await asyncio.sleep(self._lease_s / 2)
            seen = await self._database.read(coordination.current)
            if seen is None or seen.fence != fence or seen.left_s < 0:
                return
