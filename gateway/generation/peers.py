"""The coordinator's interface to the other gateway processes, whose calls run in the same engines.

Requests are sent immediately and in order; awaiting one waits until each process has done it or counts as dead. A dead process
starts no more runs; the engine's labels show the versions that sampled its last tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Protocol

from gateway.generation.plan_messages import Table
from gateway.generation.slot import Slot
from headgate.errors import GatewayError
from scheduler.program.calls import PeerLoad


class Peers(Protocol):
    """The other gateway processes, as the coordinator sees them."""

    def send_slot(self, model: str, slot: Slot) -> Awaitable[None]:
        """Send a slot's state. Followers start new runs only in open slots."""
        ...

    def begin_weight_swap(self, model: str, slot: Slot, version: int) -> Awaitable[None]:
        """Announce that the engine will continue its frozen requests under `version`."""
        ...

    def give_back(self, model: str, slot: Slot) -> Awaitable[None]:
        """Make followers abort their movable requests in the engine."""
        ...

    def remove_engine(self, model: str, name: str) -> Awaitable[None]:
        """Announce that an engine was removed."""
        ...

    def open_episode(self, episode_id: str) -> None:
        """Record a new episode, which no process has served."""
        ...

    def end_episode(self, episode_id: str, reason: GatewayError) -> Awaitable[None]:
        """Stop an episode's calls, and wait until their tokens are recorded."""
        ...

    def count_runs(self, model: str, name: str) -> tuple[int, int]:
        """Return the number of other processes' requests in an engine, and how many of these cannot move."""
        ...

    def count_waiting(self, model: str) -> int:
        """Return the number of other processes' calls that wait for an engine."""
        ...

    def peer_load(self, model: str) -> PeerLoad:
        """Return the other processes' calls, by the last report of each."""
        ...

    def send_table(self, model: str, table: Table | None) -> None:
        """Send followers the table for their placement; None: they choose by their own state, because the control program has
        stopped."""
        ...


class _Completed:
    """An awaitable that returns immediately."""

    def __await__(self) -> Generator[None]:
        return
        yield


class NoPeers:
    """No other process: for a gateway of one process."""

    def send_slot(self, model: str, slot: Slot) -> Awaitable[None]:
        return _Completed()

    def begin_weight_swap(self, model: str, slot: Slot, version: int) -> Awaitable[None]:
        return _Completed()

    def give_back(self, model: str, slot: Slot) -> Awaitable[None]:
        return _Completed()

    def remove_engine(self, model: str, name: str) -> Awaitable[None]:
        return _Completed()

    def open_episode(self, episode_id: str) -> None:
        pass

    def end_episode(self, episode_id: str, reason: GatewayError) -> Awaitable[None]:
        return _Completed()

    def count_runs(self, model: str, name: str) -> tuple[int, int]:
        return 0, 0

    def count_waiting(self, model: str) -> int:
        return 0

    def peer_load(self, model: str) -> PeerLoad:
        return PeerLoad(1)

    def send_table(self, model: str, table: Table | None) -> None:
        pass
