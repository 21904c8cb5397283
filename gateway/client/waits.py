"""The reasons why a driver waits, for its user.

Several episodes wait at the same time; the most common reason is reported, and only when it changes. A lost gateway is reported
before all others, because they follow from it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from processes.slow import SILENT_S


class Waits:
    """`report` is called with what is waited for, when that changes; empty: for nothing."""

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self._report = report
        self._reasons: dict[object, str] = {}
        self._causes: dict[object, str] = {}
        self._reported = ""

    def set(self, who: object, reason: str, cause: bool = False) -> None:
        """Note what `who` waits for; empty: for nothing any more. `cause`: others wait for the same, whatever they report."""
        for reasons in (self._reasons, self._causes):
            reasons.pop(who, None)
        if reason:
            (self._causes if cause else self._reasons)[who] = reason
        common = Counter((self._causes or self._reasons).values()).most_common(1)
        reason = common[0][0] if common else ""
        if reason != self._reported:
            self._reported = reason
            if self._report is not None:
                self._report(reason)

    @contextmanager
    def slow(self, reason: str, after_s: float = SILENT_S, cause: bool = False) -> Iterator[None]:
        """Report a block that takes longer than `after_s`, while it runs."""
        who = object()
        timer = asyncio.get_running_loop().call_later(after_s, self.set, who, reason, cause)
        try:
            yield
        finally:
            timer.cancel()
            self.set(who, "")
