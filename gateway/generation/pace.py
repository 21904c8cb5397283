"""Decides how many tokens an engine gathers in one chunk of a stream. Pure: the caller has the clock.

Clients prefer one token per chunk. But a chunk costs the gateway the same with one token or four, and more chunks than it can
process delay every stream, new ones most. So the total of chunks per second is bounded; beyond the bound, new streams get chunks
of several tokens.
"""

from __future__ import annotations

import math

MOST_TOKENS = 16
_WINDOW_S = 1.0
_CHUNKS_PER_S = 14_000.0
"""The chunks per second that one core can process (lab/notes/performance.md)."""


class Pace:
    """Measures a process's tokens per second, in windows of a second."""

    def __init__(self, chunks_per_s: float = _CHUNKS_PER_S) -> None:
        self._max_chunks_per_s = chunks_per_s
        self._began = 0.0
        self._tokens = 0
        self._rate = 0.0

    def count(self, tokens: int, now: float) -> None:
        """Count tokens that have arrived."""
        passed = now - self._began
        if passed >= _WINDOW_S:
            self._rate = self._tokens / passed
            self._began, self._tokens = now, 0
        self._tokens += tokens

    def interval(self, now: float) -> int:
        """Return the tokens per chunk for a stream that begins now: at least 1. Rates older than two windows do not count."""
        if now - self._began > 2 * _WINDOW_S:
            return 1
        return min(max(1, math.ceil(self._rate / self._max_chunks_per_s)), MOST_TOKENS)
