"""Failures of a run's episodes: the pause after one, their kinds, and the share that ends a run."""

from __future__ import annotations

import random
import re
from collections import Counter, deque

LEAST = 20
"""Episodes that have ended before their failures can stop a run."""
_WINDOW = 100
_FIRST_PAUSE_S = 0.2
_LAST_PAUSE_S = 30.0
_KINDS = 20
_LINE = 300
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\b(?=[a-z]*\d)[0-9a-f]{8,}\b|\d+")
"""The parts of a message in which two crashes of one kind differ: addresses, ids, numbers."""


class RunStopped(Exception):
    """The run cannot continue; the message is one sentence with the reason."""


def pause_s(failures: int, jitter: random.Random) -> float:
    """Return the pause after a number of failures in a row: doubled after each, with jitter."""
    longest = min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 16), _LAST_PAUSE_S)
    return longest * jitter.uniform(0.5, 1.0)


def in_a_line(error: str) -> str:
    """Return an error of many lines as one: its first and its last line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if len(lines) > 1:
        lines = [f"{lines[0].removesuffix('; stderr:')}: {lines[-1]}"]
    return lines[0][:_LINE] if lines else ""


class FailureRate:
    """Stops a run once more than the share `most` of its latest episodes failed; 1 never stops it.

    All agents that run at the same time may fail for one passing reason: that alone stops no run.
    """

    def __init__(self, most: float, concurrency: int) -> None:
        if not 0 <= most <= 1:
            raise ValueError(f"max_failures must be a share from 0 to 1, not {most}")
        self._most = most
        self._least = max(LEAST, 2 * concurrency)
        self._failed: deque[bool] = deque(maxlen=max(_WINDOW, 4 * concurrency))

    def add(self, error: str | None) -> None:
        """Count an ended episode; `error`: how it failed. Raise RunStopped if too many of the last ones failed."""
        self._failed.append(error is not None)
        ended, failed = len(self._failed), sum(self._failed)
        if error is not None and ended >= self._least and failed > self._most * ended:
            raise RunStopped(
                f"stopped, because {failed} of the last {ended} episodes failed; the limit is --max-failures of the driver,"
                f" or [run] max_failed_share of the trainer ({self._most:g}); the last error: {in_a_line(error)}"
            )


class Crashes:
    """Counts crashes by kind; beyond a few kinds, the rest count as one. The crashes of one episode come one after the other."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._episodes: Counter[str] = Counter()
        self._latest: dict[str, object] = {}
        """The episode of the latest crash of each kind."""
        self._shown: dict[str, str] = {}

    def is_new(self, error: str, episode: object = None) -> bool:
        """Count a crash. Return True if it is the first of its kind, and worth printing."""
        kind = _VARYING.sub("#", error)
        if kind not in self._counts and len(self._counts) >= _KINDS:
            kind = ""
        self._counts[kind] += 1
        self._episodes[kind] += kind not in self._latest or self._latest[kind] is not episode
        self._latest[kind] = episode
        self._shown.setdefault(kind, in_a_line(error) if kind else "others")
        return self._counts[kind] == 1 and bool(kind)

    def counts(self) -> list[tuple[str, int, int]]:
        """Return a line about each kind of crash, and the numbers of its episodes and attempts, the most frequent first."""
        return [(self._shown[kind], self._episodes[kind], n) for kind, n in self._counts.most_common()]
