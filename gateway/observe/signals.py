"""The checklist of a run's health: signals, what is healthy, what is not, and what to do then (docs/guide/console.md). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headgate.end_reasons import NOTHING_TO_TRAIN, counted, failed
from headgate.types import NO_CALLS

State = Literal["ok", "warn", "bad", "unknown"]
_NO_STEP = "no step of a trainer is known yet"
_NOT_MEASURED = "no step of this run has measured it"
_ENDED = "of the episodes that were rewarded or failed"
_NONE_ENDED = "no episode was rewarded or failed yet"


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a trainer's run as far as they are known."""

    newest: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """The newest value of each figure, and the step that it is of."""
    trained: bool = False
    """True if any step of a trainer is known."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal of which less is better. Up to `warn` it is healthy, beyond `bad` it needs an operator."""

    name: str
    label: str
    unit: Literal["share", "count", "nats"]
    warn: float
    bad: float
    do: str
    of: str = ""
    """What the value is of; empty: of a step of the trainer."""
    unknown: str = ""
    """Why there may be no value of something else than a step."""
    figures: tuple[str, ...] = ()
    """The figures of a step that it judges, the best one first. Charts of the first one that there is show its range."""

    def judged(self, value: float | None, steps: StepFigures, reason: str | None = None) -> dict[str, Any]:
        """Return the signal with its value now, and with the newest one of a step where a step has it.

        `reason`: the reason of the episodes to link to; None: no link.
        """
        named = next((name for name in self.figures if name in steps.newest), None)
        in_step: dict[str, Any] | None = None
        if named is not None:
            newest, step = steps.newest[named]
            in_step = {"figure": named, "value": newest, "step": step, "state": self.state(newest)}
        if not self.of:
            value = in_step["value"] if in_step else None
        return {
            "name": self.name,
            "label": self.label,
            "value": value,
            "unit": self.unit,
            "state": self.state(value),
            "healthy": f"at most {_shown(self.warn, self.unit)}",
            "most": self.warn,
            "words": self._words(value, in_step, steps),
            "do": self.do,
            "link": None if reason is None else {"view": "episodes", "query": {"reason": reason}},
            "in_step": in_step,
        }

    def state(self, value: float | None) -> State:
        """Return how a value is to be taken. Health and the charts of a run judge by this alone."""
        if value is None:
            return "unknown"
        return "ok" if value <= self.warn else "warn" if value <= self.bad else "bad"

    def _words(self, value: float | None, in_step: Mapping[str, Any] | None, steps: StepFigures) -> str:
        if value is None:
            return self.unknown or (_NOT_MEASURED if steps.trained else _NO_STEP)
        step = f"in step {in_step['step']}" if in_step else ""
        return f"{_shown(value, self.unit)} {self.of or step}"


_FALL = "live_reward_fall"
SIGNALS = (
    Signal(
        "unparsed_tool_calls", "Replies with malformed tool calls", "count", 0, 0,
        "the model's family is wrong, or the model has not learned the form: gateway doctor, docs/topics/templates.md", "so far",
    ),
    Signal(
        "truncated_share", "Calls that were cut at their token limit", "share", 0.1, 0.3,
        "raise max_tokens, or set [credit] truncated; look whether the model rambles", "of the newest calls",
        "no call is recorded yet",
    ),
    Signal(
        "excluded_share", "Episodes that failed and are left out", "share", 0.02, 0.1,
        "gateway episodes why EPISODE shows the error of the agent or the grader", _ENDED, _NONE_ENDED, ("excluded_share",),
    ),
    Signal(
        "no_calls", "Episodes whose agent never sampled from the trained model", "share", 0.0, 0.02,
        "gateway episodes why EPISODE lists refused calls, with what to change; if no call came, let the agent take its base URL"
        " and key from OPENAI_BASE_URL and OPENAI_API_KEY",
        _ENDED, _NONE_ENDED,
    ),
    Signal(
        "reward_errors", "Episodes whose reward could not be computed", "share", 0.0, 0.02,
        "look at the grader's error with gateway episodes why", _ENDED, _NONE_ENDED,
    ),
    Signal(
        "equal_reward_groups", "Groups whose rewards are all equal, which teach nothing", "share", 0.5, 0.9,
        "choose tasks that are neither too easy nor too hard, override [sampling] temperature, raise the group size",
        figures=("equal_reward_groups_all", "equal_reward_groups"),
    ),
    Signal(
        "untrainable_groups", "Groups of which no token can be trained", "share", 0.0, 0.1,
        "temperature 0, top-p or grammars: set [sampling] temperature = { override = 1.0 }; the gateway's log and the"
        " driver's warning name the cause", "of the newest groups that ended", "no group has ended yet",
    ),
    Signal(
        "late_share", "Tokens that are too old to be trained", "share", 0.02, 0.1,
        "fewer concurrent episodes, more engines, or a larger [staleness] eta", figures=("late_share",),
    ),
    Signal(
        # A gap of g nats moves a ratio by g: a tenth of the usual clip range (0.2) is harmless, all of it clips tokens.
        "logprob_gap_mean", "Gap of log-probabilities between trainer and engine, same version", "nats", 0.02, 0.2,
        "engine and trainer compute differently: same dtype; [engine] quantization needs [algorithm] correction; gateway doctor",
        figures=("logprob_gap_mean",),
    ),
    Signal(
        "kl_recorded_k3", "KL from the policy that sampled to the one that is trained", "nats", 0.01, 0.1,
        "the data is too old: lower [staleness] eta, or take fewer minibatches", figures=("kl_recorded_k3",),
    ),
    Signal(
        "clip_fraction", "Tokens outside of the trust region", "share", 0.2, 0.4, "lower [optimizer] lr",
        figures=("clip_fraction",),
    ),
    Signal(
        "idle_share", "Share of its time in which the trainer waits", "share", 0.3, 0.7,
        "rollout is the bottleneck: more engines or more concurrency (docs/guide/console.md)", figures=("idle_share",),
    ),
    Signal(
        "skipped_steps", "Newest steps in a row that were skipped, as their loss was not finite", "count", 0, 0,
        "lower [optimizer] lr; look at the rewards", figures=("skipped_steps",),
    ),
    Signal(
        "slow_episodes", "Running episodes that have used up half of their time", "count", 0, 8,
        "one that never ends holds its batch: gateway status names them; [episodes] total_s is their time",
        "now", "nothing runs here",
    ),
    Signal(
        _FALL, "Fall of the live agents' rewards, of their range", "share", 0, 0,
        "a version, the users or the reward changed: compare episodes; [update] canary tries versions first",
        "of the newest conversations against those before",
    ),
    Signal(
        "engine_failures", "Times that an engine was quarantined or died", "count", 0, 2,
        "the engine's log ([engine] log); scheduler replay shows why each restart was decided", "so far", "no engine is known",
    ),
)  # fmt: skip
_REWARD_FAILED = ("grading_failed", "no_reward", "reward_refused")


def judge(
    steps: StepFigures,
    reasons: Mapping[str, int],
    calls: int,
    truncated: int,
    faulty: int,
    failures: int,
    groups: Mapping[str, int],
    slow: int,
    fall: float | None,
) -> list[dict[str, Any]]:
    """Return every signal with its value.

    `reasons`: ended episodes by reason; `calls`: recent calls, of which `truncated` were cut; `faulty`: replies with faulty tool
    calls; `failures`: of engines; `groups`: recent groups that ended, by the reason for which they were dropped, empty
    for the others; `slow`: running episodes that have used up half of their time; `fall`: by how much the live agents'
    rewards fell; None without such an agent, or with too few rewards.
    """
    ended = counted(reasons).total()
    lost = failed(reasons)
    of_reasons = {
        "excluded_share": lost,
        "reward_errors": Counter({reason: lost[reason] for reason in _REWARD_FAILED}),
        "no_calls": Counter({NO_CALLS: lost[NO_CALLS]}),
    }
    values: dict[str, float | None] = {
        "truncated_share": truncated / calls if calls else None,
        **{name: own.total() / ended if ended else None for name, own in of_reasons.items()},
        "untrainable_groups": groups.get(NOTHING_TO_TRAIN, 0) / sum(groups.values()) if groups else None,
        "unparsed_tool_calls": float(faulty),
        "engine_failures": float(failures),
        "slow_episodes": float(slow),
        _FALL: fall,
    }
    completed = StepFigures({**steps.newest, **_derived(steps)}, steps.trained)
    links = {name: _commonest(own) for name, own in of_reasons.items()}
    shown = [s for s in SIGNALS if s.name != _FALL or fall is not None]
    return [s.judged(values.get(s.name), completed, links.get(s.name)) for s in shown]


def _commonest(reasons: Counter[str]) -> str | None:
    return next((reason for reason, count in reasons.most_common(1) if count), None)


def _derived(steps: StepFigures) -> dict[str, tuple[float, int]]:
    """Return the figures that are made of others, or that a step leaves out where they are 0."""
    if "trained_tokens" not in steps.newest:
        return {}
    trained, step = steps.newest["trained_tokens"]

    def in_step(name: str) -> float:
        value, at = steps.newest.get(name, (0.0, step))
        return value if at == step else 0.0

    late = in_step("masked_tokens/late")
    return {
        "late_share": (late / max(late + trained, 1.0), step),
        "skipped_steps": (in_step("skipped_steps"), step),
    }


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:g}" if unit == "count" else f"{value:.3g} nats"
