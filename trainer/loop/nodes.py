"""The trainer's nodes: claimed before it computes, released while it waits, so that they sample in the meantime.

Owns the claims. Invariants: nothing is computed while a node is not claimed; if weights are offloaded (`[gateway] offload`), a
node is released once the device's memory is free, and usable once the weights are back. A trainer without nodes can always
compute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trainer.config.settings import Settings
from trainer.loop.feed import Feed
from trainer.loop.tasks import in_thread
from trainer.model.device import device_of
from trainer.model.offload import Where
from trainer.rank_trainer import RankTrainer


@dataclass(slots=True)
class DeviceMemory:
    """How the device's memory is freed for a released node, and how long that took the last time; both functions block."""

    free: Callable[[], None]
    fill: Callable[[], None]
    freed: bool = False
    free_s: float = 0.0
    fill_s: float = 0.0


class Nodes:
    """The nodes of a trainer behind one gateway; possibly none."""

    def __init__(self, feed: Feed, names: Sequence[str], memory: DeviceMemory | None = None) -> None:
        """`memory`: None if the weights stay on the device."""
        self._feed = feed
        self._names = tuple(names)
        self._claimed = asyncio.Event()
        self._claim_s = 0.0
        self.memory = memory if names else None
        if not names:
            self._claimed.set()

    @property
    def can_compute(self) -> bool:
        """True if all nodes are claimed and the weights are on the device."""
        return self._claimed.is_set() and not (self.memory is not None and self.memory.freed)

    async def claim(self) -> None:
        """Wait until every node is claimed and the weights are back.

        Raise StepTimeout, OffloadFailed, or GatewayRefused for a node that cannot be claimed.
        """
        if not self._claimed.is_set():
            claimed = await asyncio.gather(*(self._feed.claim(name) for name in self._names))
            self._claim_s = min(claimed)
            self._claimed.set()
        if (memory := self.memory) is not None and memory.freed:
            began = time.monotonic()
            await in_thread(memory.fill)
            memory.freed, memory.fill_s = False, time.monotonic() - began

    async def release(self, compute_s: float = 0.0, overhead_s: float = 0.0) -> None:
        """Release the nodes while the trainer waits. Raise OffloadFailed.

        `compute_s`: seconds of computation on the groups of the last batch. `overhead_s`: other work on that batch; freeing the
        memory is added.
        """
        if not self._names:
            return
        if (memory := self.memory) is not None and not memory.freed:
            began = time.monotonic()
            await in_thread(memory.free)
            memory.freed, memory.free_s = True, time.monotonic() - began
            overhead_s += memory.free_s
        self._claimed.clear()
        load_s = memory.fill_s if memory is not None else 0.0
        await asyncio.gather(
            *(self._feed.release(name, compute_s, load_s, overhead_s) for name in self._names)
        )

    async def recalled(self) -> bool:
        """Return true if the gateway has no other use for any node until the batch is complete."""
        return all([await self._feed.recalled(name) for name in self._names])

    async def renew(self) -> None:
        """Renew the claims until cancelled."""
        while True:
            await self._claimed.wait()
            await asyncio.sleep(self._claim_s / 3 if self._names else 3600.0)
            if self._claimed.is_set():
                await asyncio.gather(*(self._feed.claim(name) for name in self._names))


def device_memory(settings: Settings, trainer: RankTrainer) -> DeviceMemory | None:
    """Return how the weights leave the memory of released nodes (`[gateway] offload`); None if they stay."""
    where = offload_target(settings)
    if where is None:
        return None
    return DeviceMemory(partial(trainer.offload, where, settings.run.dir), trainer.onload)


def offload_target(settings: Settings) -> Where | None:
    """Return where weights are while the nodes are released; None if they stay on the device."""
    choice = settings.gateway.offload
    if choice == "auto":
        return None if device_of(settings) == "cpu" else "host"
    return None if choice == "none" else choice
