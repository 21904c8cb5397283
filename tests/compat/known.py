"""Why tests of foreign suites fail or are skipped: each reason once. A failure without one fails `make test-compat`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """A reason, and the tests that it explains (regular expressions, searched)."""

    suite: str
    test: str
    message: str
    why: str


KNOWN: tuple[Known, ...] = ()
