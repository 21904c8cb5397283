"""The reasons why a driver waits, for its user.

Several episodes wait at the same time; the most common reason is reported, an urgent one before all others, and only when it
changes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headgate.processes.slow import SILENT_S


class Waits:
    """`report` is called with what is waited for, when that changes; empty: for nothing."""

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self._report = report
        self._reasons: dict[object, tuple[bool, str]] = {}
        """Whether it is urgent, and the reason."""
        self._reported = ""

    def set(self, who: object, reason: str, *, urgent: bool = False) -> None:
        """Note what `who` waits for; empty: for nothing any more."""
        self._reasons.pop(who, None)
        if reason:
            self._reasons[who] = urgent, reason
        counts = Counter(self._reasons.values())
        _, reason = max(counts, key=lambda kind: (kind[0], counts[kind]), default=(False, ""))
        if reason != self._reported:
            self._reported = reason
            if self._report is not None:
                self._report(reason)

    @contextmanager
    def slow(self, reason: str, after_s: float = SILENT_S) -> Iterator[None]:
        """Report a block that takes longer than `after_s`, while it runs."""
        who = object()
        timer = asyncio.get_running_loop().call_later(after_s, self.set, who, reason)
        try:
            yield
        finally:
            timer.cancel()
            self.set(who, "")
