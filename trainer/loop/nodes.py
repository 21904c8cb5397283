"""The trainer's nodes: claimed before it computes, released while it waits, so that they sample meanwhile.

Owns what is claimed. Invariant: nothing is computed while a node is not held. A trainer without nodes holds all that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trainer.loop.feed import Feed


class Nodes:
    """Some nodes behind one gateway; maybe none."""

    def __init__(self, feed: Feed, names: Sequence[str]) -> None:
        self._feed = feed
        self._names = tuple(names)
        self._held = asyncio.Event()
        self._claim_s = 0.0
        if not names:
            self._held.set()

    @property
    def held(self) -> bool:
        """True if the trainer may compute."""
        return self._held.is_set()

    async def claim(self) -> None:
        """Waits until every node is the trainer's. Raises StepTimeout, and GatewayRefused for a node that cannot be."""
        if not self.held:
            claimed = await asyncio.gather(*(self._feed.claim(name) for name in self._names))
            self._claim_s = min(claimed)
            self._held.set()

    async def release(self, busy_s: float = 0.0) -> None:
        """The trainer waits; it computed for `busy_s` on the groups of its last batch.

        Also the first thing that the gateway hears of it.
        """
        if self._names:
            self._held.clear()
            await asyncio.gather(*(self._feed.release(name, busy_s) for name in self._names))

    async def called_back(self) -> bool:
        """True if the gateway has no other use for any node until the batch is complete."""
        return all([await self._feed.called_back(name) for name in self._names])

    async def keep(self) -> None:
        """Says for ever that the nodes that are held are needed."""
        while True:
            await self._held.wait()
            await asyncio.sleep(self._claim_s / 3 if self._names else 3600.0)
            if self.held:
                await asyncio.gather(*(self._feed.claim(name) for name in self._names))
