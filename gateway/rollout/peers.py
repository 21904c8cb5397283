"""The seam between the coordinator and the other gateway processes, whose calls run in the same engines.

Whatever is asked of them is sent at once and in order; awaiting the answer waits until each of them has done it, or counts as
gone. A process that is gone starts no run any more, and the engine's own account says what its last ones were sampled by.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Protocol

from gateway.errors import GatewayError
from gateway.rollout.slot import Slot


class Peers(Protocol):
    """The other gateway processes, as the coordinator sees them."""

    def show(self, model: str, slot: Slot) -> Awaitable[None]:
        """The slot is now as it is here: what is not open gets no new run."""
        ...

    def cross(self, model: str, slot: Slot, version: int, stale_kv: bool) -> Awaitable[None]:
        """The engine will go on under `version` with the requests that are frozen in it."""
        ...

    def give_back(self, model: str, slot: Slot) -> Awaitable[None]:
        """The engine is asked to give back every request of theirs that can move."""
        ...

    def forget(self, model: str, name: str) -> Awaitable[None]:
        """There is no such engine any more."""
        ...

    def end(self, episode_id: str, reason: GatewayError) -> Awaitable[None]:
        """The episode's run is over: its calls are stopped, and what they sampled is recorded."""
        ...

    def runs(self, model: str, name: str) -> tuple[int, int]:
        """The number of other processes' requests in an engine, and how many of these cannot move."""
        ...

    def waiting(self, model: str) -> int:
        """The number of other processes' calls that wait for an engine."""
        ...


class _Done:
    """An awaitable that is done already."""

    def __await__(self) -> Generator[None]:
        return
        yield


class NoPeers:
    """A gateway of one process."""

    def show(self, model: str, slot: Slot) -> Awaitable[None]:
        return _Done()

    def cross(self, model: str, slot: Slot, version: int, stale_kv: bool) -> Awaitable[None]:
        return _Done()

    def give_back(self, model: str, slot: Slot) -> Awaitable[None]:
        return _Done()

    def forget(self, model: str, name: str) -> Awaitable[None]:
        return _Done()

    def end(self, episode_id: str, reason: GatewayError) -> Awaitable[None]:
        return _Done()

    def runs(self, model: str, name: str) -> tuple[int, int]:
        return 0, 0

    def waiting(self, model: str) -> int:
        return 0
