"""The trainer's nodes: claimed before it computes, released while it waits, so that they sample meanwhile.

Owns what is claimed. Invariants: nothing is computed while a node is not held; a node is released once the device's memory is
free, and held once all is back in it, if weights are offloaded at all (`[gateway] offload`). A trainer without nodes holds all
that it has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.loop.feed import Feed
from trainer.loop.threads import in_thread


@dataclass(slots=True)
class Memory:
    """How the device's memory is freed for a node that is released, and how long that took last; both block."""

    free: Callable[[], None]
    fill: Callable[[], None]
    freed: bool = False
    free_s: float = 0.0
    fill_s: float = 0.0


class Nodes:
    """Some nodes behind one gateway; maybe none."""

    def __init__(self, feed: Feed, names: Sequence[str], memory: Memory | None = None) -> None:
        """`memory`: None if it stays as it is."""
        self._feed = feed
        self._names = tuple(names)
        self._claimed = asyncio.Event()
        self._claim_s = 0.0
        self.memory = memory if names else None
        if not names:
            self._claimed.set()

    @property
    def held(self) -> bool:
        """True if the trainer may compute."""
        return self._claimed.is_set() and not (self.memory is not None and self.memory.freed)

    async def claim(self) -> None:
        """Waits until every node is the trainer's, and its weights are back.

        Raises StepTimeout, OffloadFailed, and GatewayRefused for a node that cannot be.
        """
        if not self._claimed.is_set():
            claimed = await asyncio.gather(*(self._feed.claim(name) for name in self._names))
            self._claim_s = min(claimed)
            self._claimed.set()
        if (memory := self.memory) is not None and memory.freed:
            began = time.monotonic()
            await in_thread(memory.fill)
            memory.freed, memory.fill_s = False, time.monotonic() - began

    async def release(self, busy_s: float = 0.0, rest_s: float = 0.0) -> None:
        """The trainer waits; it computed for `busy_s` on the groups of its last batch, and was busy for `rest_s` with the rest of
        it, to which the time is added in which the memory is freed. Raises OffloadFailed.

        Also the first thing that the gateway hears of it.
        """
        if not self._names:
            return
        if (memory := self.memory) is not None and not memory.freed:
            began = time.monotonic()
            await in_thread(memory.free)
            memory.freed, memory.free_s = True, time.monotonic() - began
            rest_s += memory.free_s
        self._claimed.clear()
        load_s = memory.fill_s if memory is not None else 0.0
        await asyncio.gather(*(self._feed.release(name, busy_s, load_s, rest_s) for name in self._names))

    async def called_back(self) -> bool:
        """True if the gateway has no other use for any node until the batch is complete."""
        return all([await self._feed.called_back(name) for name in self._names])

    async def keep(self) -> None:
        """Says for ever that the nodes that are claimed are needed."""
        while True:
            await self._claimed.wait()
            await asyncio.sleep(self._claim_s / 3 if self._names else 3600.0)
            if self._claimed.is_set():
                await asyncio.gather(*(self._feed.claim(name) for name in self._names))
