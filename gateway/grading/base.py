"""The interface of graders to the rest of the gateway. It imports the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from headgate.rewards import number


class GradingFailed(Exception):
    """An attempt gave no reward; `final` means that no other attempt would."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True, slots=True)
class Score:
    """The judgment of a grader about an episode."""

    reward: float
    """The whole, what single calls earned included."""
    calls: dict[str, float] = field(default_factory=dict)
    """The part of it that single calls earned, by their ids."""


@dataclass(frozen=True, slots=True)
class OwnGateway:
    """The addresses at which this gateway can be called: for agents, and for the administrator."""

    url: str
    admin_url: str
    admin_key: str | None = field(repr=False)


NOWHERE = OwnGateway("", "", None)
"""Enough for graders that ask no model."""


class Grader(Protocol):
    """Computes a number for an episode."""

    async def grade(self, episode: dict[str, Any]) -> Score:
        """One try; wait its turn first. Raise GradingFailed."""

    async def close(self) -> None:
        """End what outlives a try."""


def score_of(value: Any) -> Score:
    """Return a number, or an object with `reward` and perhaps `calls`, as a score. Raise ValueError."""
    if not isinstance(value, dict):
        return Score(number(value))
    calls = value.get("calls") or {}
    if "reward" not in value or not isinstance(calls, dict):
        raise ValueError('no object with "reward", and numbers by call in "calls"')
    return Score(number(value["reward"]), {str(call): number(earned) for call, earned in calls.items()})
