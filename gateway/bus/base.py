"""The interface to the bus between gateway processes: who is alive, which calls run, wake-ups, snapshots. SQL has everything
committed.

The bus may lose all of its data at any moment without loss of anything committed or acknowledged. Invariants that a bus keeps:
- each operation is atomic, and all processes see the operations in one order;
- a log has one owner and one epoch; only the owner writes it, and `take` gives the log of a dead process to one new owner;
- a process whose log was claimed is still notified for `[bus] log_s` after the log has ended, since it may have been suspended;
- the body of a log is a prefix of what its owner wrote: nothing twice, and nothing left out in between;
- every operation but `listen` raises BusUnavailable within `[bus] timeout_s` if the bus cannot be reached; it may have been done.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Process:
    """A gateway process. Its id is never used again; its URL is empty if no other process can reach it."""

    id: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """The new part of a running call's log."""

    call: str
    place: str
    """The part of the key that a call's retries share."""
    epoch: int
    head: bytes
    """The part of the log that does not change. If it is given, the log starts again and `at` is 0; empty continues the log."""
    state: bytes
    """Takes the place of the state before."""
    at: int
    """The first `at` bytes of the body are there already."""
    body: bytes
    over: bool = False
    """True if the log is no longer needed."""


Outcome = Literal["written", "gone", "taken"]
"""`gone`: the log is absent or incomplete; write all of it, with its head. `taken`: another process owns it, or did until it was
over."""


@dataclass(frozen=True, slots=True)
class Log:
    """A running call's log."""

    call: str
    owner: str
    epoch: int
    url: str | None
    """The owner's; None: it is not alive."""
    head: bytes
    state: bytes
    body: bytes
    age_s: float
    """Seconds since its owner last wrote it."""


class Bus(Protocol):
    """The bus, in this process's memory (`memory`) or in a Redis server (`redis`)."""

    shared: bool
    """True if other processes see the bus."""

    @property
    def unbroken_s(self) -> float:
        """Seconds since the last failed operation of this process; infinite if none ever failed."""
        ...

    async def announce(self, process: Process) -> None:
        """Count the process as alive for `[bus] heartbeat_ttl_s` from now."""
        ...

    async def leave(self, process: Process) -> None:
        """Count the process as dead."""
        ...

    async def address_of(self, process_id: str) -> str | None:
        """Return the URL of a live process; None if it is dead."""
        ...

    async def write(self, process: Process, entries: Sequence[Entry]) -> list[Outcome]:
        """Add to logs, and announce the process. Return the outcome of each; each log stays for `[bus] log_s` from now."""
        ...

    async def find(self, place: str) -> list[Log]:
        """Return the logs of one place, by the ids of their calls."""
        ...

    async def take_over(self, log: Log, process: Process) -> bool:
        """Make a process the owner in the next epoch and announces it, if the log has not changed since and its
        owner is dead."""
        ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Keep a value for some seconds."""
        ...

    async def get(self, key: str) -> bytes | None:
        """Return the value, if it is still there."""
        ...

    async def publish(self, topic: str, message: bytes = b"") -> None:
        """Wake those who listen now."""
        ...

    def listen(self, *topics: str) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield (topic, message), for ever. Each topic comes once, empty, at the start and after every gap, because messages may
        have been missed."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
