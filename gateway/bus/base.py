"""The seam between gateway processes for what is hot: who is alive, what runs, wake-ups, snapshots. Committed facts are in SQL.

Everything here may be lost at any moment, and then nothing that was committed or acknowledged is. Invariants that a bus keeps:
- each operation happens at once or not at all, in one order for all processes;
- a log has one owner and one epoch; only they write it, and `take` gives it to one new owner, of a process that is not alive;
- the body of a log is what its owner wrote, in its order, up to some moment: nothing twice, and nothing left out in between;
- every operation but `listen` raises BusAway within `[bus] timeout_s` if the bus cannot be reached; it may have been done.
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
    """The part of the log that does not change. With it the log begins anew and `at` is 0; empty continues the log."""
    state: bytes
    """Takes the place of the state before."""
    at: int
    """The first `at` bytes of the body are there already."""
    body: bytes
    over: bool = False
    """The log is needed no more."""


Outcome = Literal["written", "gone", "taken"]
"""`gone`: the log is not there, or not whole; write it anew with its head. `taken`: another process owns it now."""


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
        """The process counts as alive for `[bus] alive_s` from now."""
        ...

    async def leave(self, process: Process) -> None:
        """The process counts as alive no more."""
        ...

    async def address_of(self, process_id: str) -> str | None:
        """The URL of a process that is alive; None: it is not."""
        ...

    async def write(self, process: Process, entries: Sequence[Entry]) -> list[Outcome]:
        """Adds to logs, and announces the process. Answers what became of each; each log stays for `[bus] log_s` from now."""
        ...

    async def find(self, place: str) -> list[Log]:
        """The logs of one place, by the ids of their calls."""
        ...

    async def take(self, log: Log, process: Process) -> bool:
        """Makes a process the owner, in the next epoch, and announces it; if the log is still as it was found and its owner
        is not alive."""
        ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Keeps a value for some seconds."""
        ...

    async def get(self, key: str) -> bytes | None:
        """The value, if it is still there."""
        ...

    async def publish(self, topic: str, message: bytes = b"") -> None:
        """Wakes those who listen now."""
        ...

    def listen(self, *topics: str) -> AsyncGenerator[tuple[str, bytes], None]:
        """(topic, message), for ever. Each topic comes once at the start and after every gap, empty: something may have been
        missed."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...
