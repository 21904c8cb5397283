"""The checklist of a run's health: signals, what is healthy, what is not, and what to do then (docs/signals.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "bad", "unknown"]
_NO_STEP = "no step of a trainer is known yet"


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal of which less is better. Up to `warn` it is healthy, beyond `bad` it needs somebody."""

    name: str
    label: str
    unit: Literal["share", "count", "nats"]
    warn: float
    bad: float
    do: str
    unknown: str = _NO_STEP
    """Why there may be no value."""
    query: Mapping[str, str] | None = None
    """The filter of the episodes that it is about."""

    def judged(self, value: float | None) -> dict[str, Any]:
        """The signal with its value now."""
        return {
            "name": self.name,
            "label": self.label,
            "value": value,
            "unit": self.unit,
            "state": self.state(value),
            "healthy": f"at most {_shown(self.warn, self.unit)}",
            "words": self.unknown if value is None else f"{_shown(value, self.unit)} now",
            "do": self.do,
            "link": None if self.query is None else {"view": "episodes", "query": dict(self.query)},
        }

    def state(self, value: float | None) -> State:
        """How a value is to be taken."""
        if value is None:
            return "unknown"
        return "ok" if value <= self.warn else "warn" if value <= self.bad else "bad"


SIGNALS = (
    Signal(
        "unparsed_tool_calls", "Replies whose tool calls no agent gets or can run", "count", 0, 0,
        "the model's family is wrong, or the model has not learnt the form: gateway doctor, docs/templates.md",
    ),
    Signal(
        "truncated_share", "Calls that were cut at their token limit", "share", 0.1, 0.3,
        "raise max_tokens, or set [credit] truncated; look whether the model rambles", "no call is recorded yet",
    ),
    Signal(
        "excluded_share", "Episodes that failed and are left out", "share", 0.02, 0.1,
        "gateway episodes why EPISODE has what the agent or the grader said", "no episode has ended yet",
        {"reason": "agent_failed"},
    ),
    Signal(
        "reward_errors", "Episodes whose reward could not be computed", "share", 0.0, 0.02,
        "look at the grader's error with gateway episodes why", "no episode has ended yet", {"reason": "grading_failed"},
    ),
    Signal(
        "equal_reward_groups", "Groups whose rewards are all equal, which teach nothing", "share", 0.5, 0.9,
        "choose tasks that are neither too easy nor too hard, override [sampling] temperature, raise the group size",
    ),
    Signal(
        "late_share", "Tokens that are too old to be trained", "share", 0.02, 0.1,
        "fewer episodes at once, more engines, or a larger [staleness] eta",
    ),
    Signal(
        "logprob_gap_mean", "Gap of log-probabilities between trainer and engine, same version", "nats", 0.02, 0.2,
        "engine and trainer compute differently: same dtype, no quantized engine; gateway doctor",
    ),
    Signal(
        "kl_recorded_k3", "KL from the policy that sampled to the one that is trained", "nats", 0.01, 0.1,
        "the data is too old: lower [staleness] eta, or take fewer minibatches",
    ),
    Signal(
        "clip_fraction", "Tokens outside of the trust region", "share", 0.2, 0.4, "lower [optimizer] lr",
    ),
    Signal(
        "skipped_steps", "Newest steps in a row that were skipped, as their loss was not finite", "count", 0, 0,
        "lower [optimizer] lr; look at the rewards",
    ),
    Signal(
        "engine_failures", "Times that an engine was quarantined or died", "count", 0, 2,
        "the engine's log ([engine] log); scheduler replay says why each restart was decided", "no engine is known",
    ),
)  # fmt: skip
_OF_STEPS = ("equal_reward_groups", "logprob_gap_mean", "kl_recorded_k3", "clip_fraction")
_FAILED = (
    "agent_failed", "grading_failed", "tool_failed", "environment_failed", "sandbox_killed", "idle_deadline", "total_deadline",
    "no_reward",
)  # fmt: skip
_REWARD_FAILED = ("grading_failed", "no_reward")


def judge(
    figures: Mapping[str, float],
    reasons: Mapping[str, int],
    calls: int,
    truncated: int,
    faulty: int,
    failures: int,
) -> list[dict[str, Any]]:
    """Every signal with its value.

    `figures`: of the newest step, empty: none; `reasons`: ended episodes by reason; `calls`: recent calls, of which `truncated`
    were cut; `faulty`: replies with faulty tool calls; `failures`: of engines.
    """
    ended = sum(reasons.values())
    values: dict[str, float | None] = {name: figures.get(name) for name in _OF_STEPS}
    values["late_share"] = _late(figures)
    values["skipped_steps"] = figures.get("skipped_steps", 0.0) if figures else None
    values["truncated_share"] = truncated / calls if calls else None
    values["excluded_share"] = sum(reasons.get(r, 0) for r in _FAILED) / ended if ended else None
    values["reward_errors"] = sum(reasons.get(r, 0) for r in _REWARD_FAILED) / ended if ended else None
    values["unparsed_tool_calls"], values["engine_failures"] = float(faulty), float(failures)
    return [signal.judged(values[signal.name]) for signal in SIGNALS]


def _late(figures: Mapping[str, float]) -> float | None:
    if "trained_tokens" not in figures:
        return None
    late = figures.get("masked_tokens/late", 0.0)
    return late / max(late + figures["trained_tokens"], 1.0)


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:g}" if unit == "count" else f"{value:.3g} nats"
