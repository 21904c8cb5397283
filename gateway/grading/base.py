"""What a grader is to the rest of the gateway. It imports the standard library alone: worker processes start with it."""

from __future__ import annotations

import math
from typing import Any, Protocol


class GradingFailed(Exception):
    """A try gave no reward; `final` says that no other try would."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class Grader(Protocol):
    """Computes a number for an episode."""

    async def grade(self, episode: dict[str, Any]) -> float:
        """One try; waits its turn first. Raises GradingFailed."""

    async def close(self) -> None:
        """Ends what outlives a try."""


def finite(value: Any) -> float:
    """A grader's answer as a number. Raises ValueError."""
    if isinstance(value, str | bytes):
        raise ValueError(f"a grader answers a number, not {value[:200]!r}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a grader answers a number, not {str(value)[:200]}") from error
    if not math.isfinite(number):
        raise ValueError(f"a grader answers a finite number, not {number}")
    return number
