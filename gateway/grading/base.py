"""The interface of graders to the rest of the gateway. It imports the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from headgate.rewards import number


class GradedCall(TypedDict):
    """A call of a graded episode."""

    call_id: str
    model: str
    requested: dict[str, Any]
    finish_reason: str
    reward: float | None


class GradedTurn(TypedDict):
    """A turn of the episode's own model, as text."""

    call_id: str
    prompt_text: str
    text: str
    next_text: str


class GradedEpisode(TypedDict):
    """The input of a grader (see the package)."""

    episode_id: str
    task_id: str
    group_id: str
    model: str
    metadata: dict[str, Any]
    calls: list[GradedCall]
    turns: list[GradedTurn]
    final_text: str


class GradingFailed(Exception):
    """An attempt gave no reward; `final` means that no other attempt would."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True, slots=True)
class Score:
    """The judgment of a grader about an episode."""

    reward: float | None
    """The whole, what single calls earned included. None: the grader has no opinion about the episode."""
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

    async def grade(self, episode: GradedEpisode) -> Score:
        """One try; wait its turn first. Raise GradingFailed."""

    async def close(self) -> None:
        """End what outlives a try."""


def score_of(value: Any) -> Score:
    """Return a number, or an object with `reward` (None: no opinion) and perhaps `calls`, as a score. Raise ValueError.

    None alone is refused: it is what a function gives that forgets to return. Without a reward there are no rewards of calls,
    which would be parts of nothing.
    """
    if value is None:
        raise ValueError('a number, not None; with no opinion, return {"reward": None}')
    if not isinstance(value, dict):
        return Score(number(value))
    calls = value.get("calls") or {}
    if "reward" not in value or not isinstance(calls, dict):
        raise ValueError('no object with "reward", and numbers by call in "calls"')
    earned = {str(call): number(reward) for call, reward in calls.items() if reward is not None}
    if value["reward"] is not None:
        return Score(number(value["reward"]), earned)
    if earned:
        raise ValueError('"calls" has rewards, and "reward" is null: it is the sum that they are parts of')
    return Score(None)
