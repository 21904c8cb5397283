"""What a rewarded episode is worth once its run is over. Pure.

A reward measures the policy only if the policy had a part in the episode. So a training episode that sampled no token
from its own model, and an evaluation episode whose agent never called a model, end as `no_calls` instead of `rewarded`. (A call
that is refused is a call: an evaluation whose prompt outgrew the context has its reward.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.episodes.closing_state import Outcome
from gateway.store.sampled import Sampled
from headgate.mask_reasons import REMEDIES
from headgate.types import NO_CALLS, EpisodeMode

_HOW = "an agent must take its base URL from OPENAI_BASE_URL and its key from OPENAI_API_KEY, or what a function is given"


@dataclass(frozen=True, slots=True)
class RewardTaken:
    """What became of a final reward."""

    accepted: bool
    """True if it is the episode's reward: in its group's baseline, or in an evaluation."""
    reason: str
    """`rewarded`; `eval` for an evaluation episode; else why the reward does not count."""
    trainable_tokens: int = 0
    notice: str = ""
    """What to do if the reward does not count, or if no token can be trained; else empty."""


def taken(row: Mapping[str, Any], found: Sampled) -> RewardTaken:
    """Return what became of the reward of a closed episode, whose stored row is given."""
    if row["reason"] != "rewarded":
        return RewardTaken(False, row["reason"], notice=row["error"])
    if row["mode"] == "eval":
        return RewardTaken(True, "eval")
    return RewardTaken(True, "rewarded", found.trainable, untrainable(found))


def without_calls(mode: EpisodeMode, model: str, found: Sampled) -> Outcome | None:
    """Return the end of an episode in which the policy had no part; None if it had one."""
    if found.tokens if mode == "train" else found.calls or found.refused:
        return None
    return Outcome(NO_CALLS, {"error": _why(model, found)})


def _why(model: str, found: Sampled) -> str:
    if found.refused:
        calls = "a call" if found.refused == 1 else f"{found.refused} calls"
        were = "was refused with" if found.refused == 1 else "were refused, the last with"
        return f"the agent sampled nothing from {model}: {calls} of the agent {were} {found.last_refusal}"
    if not found.calls:
        return f"the agent called no model of this gateway: {_HOW}"
    if others := sorted(set(found.calls) - {model}):
        return f"the agent called {', '.join(others)} alone, and never the trained model {model}"
    return f"the last attempt of the agent sampled nothing from {model}: {_HOW}"


def untrainable(found: Sampled) -> str:
    """Return why no token of an episode can be trained, and what to do; empty if there are trainable tokens."""
    if found.trainable or not found.tokens:
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.masked.most_common())
    todo = [REMEDIES[reason] for reason, _ in found.masked.most_common() if reason in REMEDIES]
    return "; ".join([f"none of its {found.tokens} sampled tokens can be trained ({reasons})", *todo])
