"""The outcome of an episode that is driven: a reward that the gateway accepted, an abort, or an error."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from headgate.client.agents import (
    AGENT_FAILED,
    AgentCrashed,
    Reward,
)
from headgate.end_reasons import GIVEN_UP
from headgate.errors import shortened


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """The outcome of one episode: a reward that the gateway accepted, an abort, or an error."""

    task_id: str
    group_id: str
    episode_id: str | None
    """None if the gateway refused to open it."""
    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    aborted: str | None = None
    """The reason for which the gateway does not need the episode; it has neither reward nor error then."""
    attempts: int = 0
    """The number of times the agent was started."""
    crashes: tuple[str, ...] = ()
    """The errors of the attempts that crashed."""
    seconds: float = 0.0
    """The time from admission to reward or abandonment."""
    notice: str = ""
    """Why no token of the rewarded episode can be trained, and what to do; else empty."""
    task_number: int = 0
    """The number of its task among those of the run, from 0; two tasks may have one id."""


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """The end of an episode: exactly one of the first three fields is set."""

    reward: Reward | None = None
    error: str | None = None
    aborted: str | None = None
    notice: str = ""
    """See `EpisodeOutcome`."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A failed attempt of an agent: in short (`summary`), with the traceback if it has one (`report`), and its reason."""

    summary: str
    report: str
    reason: str = AGENT_FAILED

    @classmethod
    def of(cls, error: Exception) -> Crash:
        summary = f"{type(error).__name__}: {error}"
        if isinstance(error, AgentCrashed):  # quotes the output of the agent's own process
            return cls(shortened(summary), shortened(summary), error.reason)
        return cls(shortened(summary), shortened(f"{summary}\n{''.join(traceback.format_exception(error))}"))


def closed(reason: str, error: str | None = None) -> EpisodeEnded:
    """Return the end of an episode that the gateway closed without a reward."""
    if reason in GIVEN_UP:
        return EpisodeEnded(aborted=reason)
    return EpisodeEnded(error="; ".join(filter(None, (error, f"closed by the gateway: {reason}"))))
