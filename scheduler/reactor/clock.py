"""Logical tags, and the clocks that decide which of them are due.

All times are integer nanoseconds: sums are exact, and the same on every machine.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

MILLISECOND = 1_000_000
SECOND = 1_000_000_000


class Tag(NamedTuple):
    """A moment of logical time: at one `time`, microsteps follow each other."""

    time: int
    microstep: int = 0

    def after(self, delay: int) -> Tag:
        """Return the tag `delay` later; a delay of 0 is one microstep."""
        return Tag(self.time + delay, 0) if delay else Tag(self.time, self.microstep + 1)

    def __str__(self) -> str:
        return f"({self.time}, {self.microstep})"


class Clock(Protocol):
    """The source of a runtime's time."""

    def now(self) -> int:
        """Return the nanoseconds; never less than before."""


class WallClock:
    """Nanoseconds since 1970 when the clock was made, and by the monotonic clock from then on: it is never set back."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        return self._offset + time.monotonic_ns()


class VirtualClock:
    """A clock that only tests move."""

    def __init__(self, start: int = 0) -> None:
        self._now = start

    def now(self) -> int:
        return self._now

    def advance_to(self, time: int) -> None:
        """Move the clock forward. Raise ValueError if `time` has passed."""
        if time < self._now:
            raise ValueError(f"the clock is at {self._now}: it cannot go back to {time}")
        self._now = time
