"""What a rewarded episode is worth once its run is over. Pure.

A reward measures the policy only if the policy had a part in the episode. So a training episode that sampled no token
from its own model, and an evaluation episode whose agent never called a model, end as `no_calls` instead of `rewarded`. (A call
that is refused is a call: an evaluation whose prompt outgrew the context has its reward.)
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.episodes.closing_state import Outcome
from gateway.store.records import EpisodeRecord
from gateway.store.sampled import Sampled
from headgate.mask_reasons import REMEDIES
from headgate.types import NO_CALLS, EpisodeMode

_HOW = "an agent must take its base URL from OPENAI_BASE_URL and its key from OPENAI_API_KEY, or what its function receives"


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What became of a final reward."""

    accepted: bool
    """True if it is the episode's reward: in its group's baseline, or in an evaluation."""
    reason: str
    """`rewarded`; `eval` for an evaluation episode; else why the reward does not count."""
    trainable_tokens: int = 0
    notice: str = ""
    """What to do if the reward does not count, or if no token can be trained; else empty."""


def reward_outcome(row: EpisodeRecord, sampled: Sampled) -> RewardOutcome:
    """Return what became of the reward of a closed episode; `row`: as it is stored."""
    if row["reason"] != "rewarded":
        return RewardOutcome(False, row["reason"], notice=row["error"])
    if row["mode"] == "eval":
        return RewardOutcome(True, "eval")
    return RewardOutcome(True, "rewarded", sampled.trainable, untrainable(sampled))


def without_calls(mode: EpisodeMode, model: str, sampled: Sampled) -> Outcome | None:
    """Return the end of an episode in which the policy had no part; None if it had one."""
    if sampled.tokens if mode == "train" else sampled.calls or sampled.refused:
        return None
    return Outcome(NO_CALLS, {"error": _no_calls_error(model, sampled)})


def _no_calls_error(model: str, sampled: Sampled) -> str:
    if sampled.refused:
        calls = "a call" if sampled.refused == 1 else f"{sampled.refused} calls"
        were = "was refused with" if sampled.refused == 1 else "were refused, the last with"
        return f"the agent sampled nothing from {model}: {calls} of the agent {were} {sampled.last_refusal}"
    if not sampled.calls:
        return f"the agent called no model of this gateway: {_HOW}"
    if others := sorted(set(sampled.calls) - {model}):
        return f"the agent called {', '.join(others)} alone, and never the trained model {model}"
    return f"the last attempt of the agent sampled nothing from {model}: {_HOW}"


def untrainable(sampled: Sampled) -> str:
    """Return why no token of an episode can be trained, and what to do; empty if there are trainable tokens."""
    if sampled.trainable or not sampled.tokens:
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sampled.masked.most_common())
    todo = [REMEDIES[reason] for reason, _ in sampled.masked.most_common() if reason in REMEDIES]
    return "; ".join([f"none of its {sampled.tokens} sampled tokens can be trained ({reasons})", *todo])
