"""The seconds of one step, by what they were spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.report.metrics import Span


class Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        """When each block was, under the last of its names, in order."""
        self._offset = time.time() - self.started

    @contextmanager
    def on(self, *names: str) -> Iterator[None]:
        """Counts a block's seconds under every name."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            for name in names:
                self.seconds[name] = self.seconds.get(name, 0.0) + ended - started
            self.spans.append((names[-1], started + self._offset, ended + self._offset))

    @property
    def total(self) -> float:
        """Since the clock was made."""
        return time.monotonic() - self.started
