"""The interface of graders to the rest of the gateway. It imports the standard library alone."""

from __future__ import annotations

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
