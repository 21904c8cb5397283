"""An episode that is not closed, as the gateway has it in memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from gateway.episodes.closing_state import RUNNING, ClosingState, Outcome, Phase
from gateway.generation.running_calls import RunningCalls
from gateway.store.sampled import Sampled
from headgate.errors import Conflict
from headgate.types import AS_REQUESTED, EpisodeMode, EpisodeSampling

CALLS = "calls"
"""The component of a reward that was posted on calls."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class OpenEpisode:
    """One run of an agent, and what it was given so far."""

    id: str
    task_id: str
    group_id: str
    mode: EpisodeMode
    model: str
    """The trained model whose ledger the episode is in."""
    opened_at: float
    last_used_at: float
    created_at: float = 0.0
    """When it was opened, in seconds since the epoch; the other times are of this process's clock. 0: not known here."""
    key_hash: str = ""
    """Empty until the key was seen, for an episode that was open before the gateway's start."""
    agent: str = ""
    """The agent (`[agents]`) whose key reaches it; empty: none."""
    opening: str = ""
    """The name of the request that opened it (`RequestKey.name`); empty: the admin API did."""
    continued: bool = False
    """True if a second request arrived for an episode that a request opened, so the first one's sender has had its reply."""
    attempt: int = 1
    """The number of its agent's attempt, which the key of a later one ends with."""
    calls: RunningCalls = field(default_factory=RunningCalls)
    """The calls of this attempt."""
    posted: float | None = None
    """A reward that is not final."""
    components: dict[str, float] | None = None
    refused: int = 0
    """Calls of this process that were refused."""
    call_rewards: dict[str, float] = field(default_factory=dict)
    ending: ClosingState = RUNNING
    """The episode's progress to its end."""
    grading: asyncio.Task[Outcome] | None = None
    """The task that computes the reward."""
    version: int = 0
    """No older version may sample its calls of its own model: its group's `min_version`."""
    sampling: EpisodeSampling = AS_REQUESTED
    """Sampling parameters of the calls to its own model."""
    sampled: Sampled | None = None
    """What it sampled; None until its calls have ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its end is committed."""

    @property
    def state(self) -> Literal["open", "grading", "ending"]:
        """The episode's state in the API; `grading` from the end of its run until there is a reward."""
        if self.ending.phase is Phase.OPEN:
            return "open"
        return "ending" if self.ending.outcome else "grading"

    @property
    def has_reward(self) -> bool:
        """True if a reward was posted, on the episode or on its calls."""
        return self.posted is not None or bool(self.call_rewards)

    def set_key(self, key_hash: str) -> None:
        """Set the hash of the key, which a request has sent."""
        self.key_hash = key_hash

    def touch(self, ago_s: float = 0.0) -> None:
        """Record that a request of the episode came `ago_s` seconds ago."""
        self.last_used_at = max(self.last_used_at, time.monotonic() - ago_s)

    def continue_conversation(self) -> None:
        """Record that another request continued the conversation that opened the episode."""
        self.continued = True
        self.touch()

    def leave_training(self) -> None:
        """Go on as an evaluation episode."""
        self.mode = "eval"

    def adopt(self, earlier: OpenEpisode) -> None:
        """Take over what this process has of the episode from the time when it followed another coordinator."""
        self.calls, self.last_used_at = earlier.calls, max(self.last_used_at, earlier.last_used_at)

    def post(self, reward: float, components: dict[str, float] | None) -> None:
        """Set a reward that is not final."""
        self.posted, self.components = reward, components

    def count_refused(self) -> int:
        """Count a refused call, and return their number."""
        self.refused += 1
        return self.refused

    def forsake(self, attempt: int) -> None:
        """Forget the rewards posted so far, which were for an attempt that crashed, and begin the next attempt."""
        self.posted, self.components, self.call_rewards = None, None, {}
        self.begin_attempt(attempt)

    def begin_attempt(self, attempt: int) -> None:
        """Give an attempt that is new here calls of its own: requests of the one before can add none to them."""
        if attempt != self.attempt:
            self.attempt, self.calls = attempt, RunningCalls()

    def check_attempt(self, attempt: int) -> None:
        """Raise OtherAttempt for a request of another attempt than the present one."""
        if attempt != self.attempt:
            raise OtherAttempt(self, attempt)

    def rewarded(self, reward: float, components: dict[str, float] | None) -> Outcome:
        """Return the outcome of a final reward, with the rewards that were posted on the episode's calls."""
        if self.call_rewards:
            total = sum(self.call_rewards.values())
            reward, components = reward + total, {**(components or {}), CALLS: total}
        return Outcome("rewarded", {"reward": reward, "components": components})


def closed(episode_id: str, reason: str) -> Conflict:
    """Return the error for requests to an episode that is closed."""
    return Conflict(f"episode {episode_id} is closed ({reason})", code="episode_closed")


def graded(episode_id: str) -> Conflict:
    """Return the error for requests to an episode that is being graded."""
    return Conflict(f"episode {episode_id} is being graded: its run is over", code="episode_grading")


def crashed(episode_id: str) -> Conflict:
    """Return the error for the running calls of an attempt that crashed."""
    return Conflict(f"the agent of episode {episode_id} was started again", code="attempt_over")


class OtherAttempt(Conflict):
    """A request has the key of another attempt than the present one."""

    def __init__(self, episode: OpenEpisode, attempt: int) -> None:
        self.episode = episode
        begun = attempt < episode.attempt
        why = "whose agent was started again" if begun else "which has not begun"
        message = (
            f"this key is of attempt {attempt} of episode {episode.id}, {why}: {_key_of(episode.attempt)} (the response of POST"
            f" /admin/v1/episodes/{episode.id}/restart has the number)"
        )
        super().__init__(message, code="attempt_over" if begun else "attempt_not_begun")


def _key_of(attempt: int) -> str:
    if attempt == 1:
        return "attempt 1 uses the episode's key as it is"
    return f"attempt {attempt} uses the episode's key followed by .{attempt}"
