"""Decides about a version that a share of new conversations gets before all others do (a canary). Pure.

The rewards of the candidate's conversations are compared with those of the live version's in the same time by a sequential test
that may be looked at after every conversation: each mean has a confidence sequence, an interval that contains the true mean at
all times together with probability 1 - `alpha`. It is the two-sided normal mixture for bounded variables (Howard, Ramdas,
McAuliffe, Sekhon: Time-uniform, nonparametric, nonasymptotic confidence sequences, Annals of Statistics 2021, arXiv 1810.08240,
after Robbins 1970). Invariants:
- a conversation's version is drawn by its id and the candidate alone, so it is the same in every process and after every restart;
- the candidate is returned as soon as its interval of rewards lies below the live version's, or its interval of conversations
  with malformed tool calls or with refused calls lies above. A candidate that equals the live version is returned with
  probability `ALPHA` at most;
- it is promoted as soon as its interval of rewards lies above, or after `conversations` rewarded ones without a reason to return
  it; while it is held, nothing is decided;
- the state is the fold of the conversations in the order of their ends, so that it can be made again from the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

Arm = Literal["candidate", "live"]
Outcome = Literal["promoted", "returned"]
ALPHA = 0.05
"""The probability that a candidate which equals the live version is ever returned."""
_DRIFT_ALPHA = 0.001
"""The same for one comparison of the newest rewards with those before. They are compared again and again, so it is smaller."""
_TESTS = 3
"""Rewards, malformed tool calls, refused calls."""
_TUNED_FOR = 100
"""The number of observations at which the interval is the narrowest possible."""


def drawn(version: int, conversation: str, share: float) -> bool:
    """Return true if a conversation gets the candidate `version`, which a `share` of all conversations do."""
    digest = blake2b(f"{version} {conversation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def radius(count: int, alpha: float) -> float:
    """Return half the width of the confidence sequence for a mean of `count` observations between 0 and 1."""
    if not count:
        return math.inf
    rho = _TUNED_FOR / 4 / (2 * math.log(1 / alpha) + math.log(1 + 2 * math.log(1 / alpha)))
    variance = count / 4
    return math.sqrt((variance + rho) * (math.log((variance + rho) / rho) + 2 * math.log(1 / alpha))) / count


@dataclass(slots=True)
class Mean:
    """The mean of observations, which are clipped to `low` and `high`, and its interval."""

    low: float = 0.0
    high: float = 1.0
    count: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        """Add an observation."""
        self.count += 1
        self.total += min(max(value, self.low), self.high)

    @property
    def value(self) -> float | None:
        """The mean; None without an observation."""
        return self.total / self.count if self.count else None

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval that contains the true mean with probability 1 - `alpha`, at all times together."""
        if not self.count:
            return self.low, self.high
        mean, half = self.total / self.count, radius(self.count, alpha) * (self.high - self.low)
        return max(self.low, mean - half), min(self.high, mean + half)

    def below(self, other: Mean, alpha: float) -> bool:
        """Return true if this mean is below another; wrong with probability `alpha` at most."""
        return self.interval(alpha / 2)[1] < other.interval(alpha / 2)[0]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that has ended."""

    arm: Arm
    reward: float | None
    """None: no grader and no user had an opinion."""
    tokens: int = 0
    """Sampled tokens."""
    seconds: float = 0.0
    """Seconds that its calls took."""
    faulty: bool = False
    """A reply had malformed tool calls."""
    refused: bool = False
    """A call was refused."""


@dataclass(slots=True)
class ArmFigures:
    """What the ended conversations of one arm were like."""

    rewards: Mean
    faulty: Mean = field(default_factory=Mean)
    refused: Mean = field(default_factory=Mean)
    conversations: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, one: Conversation) -> None:
        """Add a conversation."""
        self.conversations += 1
        self.tokens += one.tokens
        self.seconds += one.seconds
        self.faulty.add(float(one.faulty))
        self.refused.add(float(one.refused))
        if one.reward is not None:
            self.rewards.add(one.reward)

    def to_json(self) -> dict[str, Any]:
        """Return the figures; the interval of rewards is that of the test."""
        low, high = self.rewards.interval(ALPHA / _TESTS / 2)
        return {
            "conversations": self.conversations,
            "rewarded": self.rewards.count,
            "reward_mean": self.rewards.value,
            "reward_low": low,
            "reward_high": high,
            "faulty_share": self.faulty.value,
            "refused_share": self.refused.value,
            "tokens_mean": self.tokens / self.conversations if self.conversations else None,
            "seconds_per_token": self.seconds / self.tokens if self.tokens else None,
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """The end of a trial."""

    outcome: Outcome
    why: str


def reward_range(history: Sequence[float]) -> tuple[float, float]:
    """Return the range of the live version's earlier rewards, to which those of a trial are clipped; 0 to 1 if they do not
    differ."""
    low, high = min(history, default=0.0), max(history, default=1.0)
    return (low, high) if low < high else (min(low, 0.0), max(high, 1.0))


class CanaryTest:
    """The test of one candidate."""

    def __init__(self, conversations: int, low: float, high: float) -> None:
        """`conversations`: after how many rewarded ones a candidate is promoted. `low`, `high`: the range of rewards."""
        self._needed = conversations
        self.arms: dict[Arm, ArmFigures] = {
            "candidate": ArmFigures(Mean(low, high)),
            "live": ArmFigures(Mean(low, high)),
        }

    def add(self, one: Conversation) -> None:
        """Add a conversation that has ended."""
        self.arms[one.arm].add(one)

    @property
    def decision(self) -> Decision | None:
        """What follows from the conversations so far; None: more are needed."""
        candidate, live = self.arms["candidate"], self.arms["live"]
        alpha = ALPHA / _TESTS
        if candidate.rewards.below(live.rewards, alpha):
            return Decision("returned", f"its rewards are lower: {self._compared('rewards')}")
        if live.faulty.below(candidate.faulty, alpha):
            return Decision(
                "returned", f"more conversations have malformed tool calls: {self._compared('faulty')}"
            )
        if live.refused.below(candidate.refused, alpha):
            return Decision("returned", f"more conversations have refused calls: {self._compared('refused')}")
        if live.rewards.below(candidate.rewards, alpha):
            return Decision("promoted", f"its rewards are higher: {self._compared('rewards')}")
        if candidate.rewards.count >= self._needed and live.rewards.count:
            return Decision("promoted", f"its rewards are not found to be lower: {self._compared('rewards')}")
        return None

    @property
    def progress(self) -> str:
        """The state of the trial in words."""
        rewarded = self.arms["candidate"].rewards.count
        return f"on trial: {rewarded} of at most {self._needed} rewarded conversations; {self._compared('rewards')}"

    def _compared(self, name: Literal["rewards", "faulty", "refused"]) -> str:
        return " against ".join(_words(getattr(self.arms[arm], name)) for arm in ("candidate", "live"))

    def figures(self) -> dict[str, Any]:
        """Return the figures of both arms."""
        return {arm: figures.to_json() for arm, figures in self.arms.items()}


def _words(mean: Mean) -> str:
    if mean.value is None:
        return "none yet"
    low, high = mean.interval(ALPHA / _TESTS / 2)
    return f"{mean.value:.3g} ({low:.3g} to {high:.3g}) of {mean.count}"


def fell(history: Iterable[float], newest: Iterable[float]) -> tuple[Mean, Mean, bool]:
    """Compare the newest live rewards with those before; return both means, and whether the newest are lower."""
    before = list(history)
    low, high = reward_range(before)
    means = Mean(low, high), Mean(low, high)
    for mean, values in zip(means, (before, newest), strict=True):
        for value in values:
            mean.add(value)
    return *means, means[1].below(means[0], _DRIFT_ALPHA)
