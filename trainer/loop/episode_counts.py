"""Counts of the episodes and groups that ended since the last step, before the gateway filtered them for the batch, and the
seconds of its engines.

All classes compare the gateway's totals before and after a step. Pure: no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headgate.client.failures import LEAST
from headgate.end_reasons import counted, failed
from scheduler.policies import limits
from trainer.errors import TooManyFailed

EQUAL = "zero_variance"
"""The reason for which the gateway drops groups of equal rewards."""


class FailedEpisodes:
    """The rewarded and the failed training episodes of a run, and the bound on the share of failures that stops it."""

    def __init__(self, max_share: float) -> None:
        """`max_share`: 1 never stops the run."""
        self._max_share = max_share
        self._totals: Mapping[str, int] | None = None
        self._since_step: Counter[str] = Counter()
        self._unjudged: Counter[str] = Counter()
        """Episodes since the bound was last compared with enough of them."""

    def update(self, totals: Mapping[str, int]) -> None:
        """Count the ended episodes by reason; `totals` are of all time. Raise TooManyFailed."""
        before = totals if self._totals is None else self._totals
        self._totals = dict(totals)
        # Retention may have deleted more than ended.
        new = Counter({reason: max(0, count - before.get(reason, 0)) for reason, count in totals.items()})
        self._since_step += counted(new)
        self._unjudged += counted(new)
        if self._unjudged.total() >= LEAST:
            unjudged, self._unjudged = self._unjudged, Counter()
            self._judge(unjudged)

    def figures(self) -> dict[str, float]:
        """Return the share of episodes that failed since the last step, and their number by reason; start the next step."""
        ended, self._since_step = self._since_step, Counter()
        if not ended:
            return {}
        lost = {reason: float(count) for reason, count in sorted(failed(ended).items())}
        share = sum(lost.values()) / ended.total()
        return {"excluded_share": share, **{f"excluded/{reason}": n for reason, n in lost.items()}}

    def _judge(self, ended: Counter[str]) -> None:
        failures = failed(ended)
        if failures.total() <= self._max_share * ended.total():
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in failures.most_common())
        (most, _), *_ = failures.most_common()
        raise TooManyFailed(
            f"stopped, because {failures.total()} of the last {ended.total()} episodes failed and are left out of training"
            f" ({reasons}), and [run] max_failed_share is {self._max_share:g}; fix the cause, and the next start continues"
            " from the newest checkpoint",
            most,
        )


class GroupTotals:
    """The groups and rewards of a run before filters, also those that the gateway leaves out of batches."""

    def __init__(self) -> None:
        self._totals: Mapping[str, Any] | None = None
        self._rewards = 0
        self._reward_sum = 0.0
        self._dropped: Counter[str] = Counter()

    def update(self, totals: Mapping[str, Any]) -> None:
        """Count the groups and rewards; `totals` are the gateway's, since the start of its ledger."""
        before = totals if self._totals is None else self._totals
        self._totals = totals
        if not totals or totals["rewards"] < before.get("rewards", 0):  # another ledger
            return
        self._rewards += totals["rewards"] - before["rewards"]
        self._reward_sum += totals["reward_sum"] - before["reward_sum"]
        self._dropped += Counter(totals["groups"]) - Counter(before["groups"])
        del self._dropped["batch"]

    def figures(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Return the figures since the last step, given those of its batch; start the next step."""
        rewards, total, dropped = self._rewards, self._reward_sum, self._dropped
        self._rewards, self._reward_sum, self._dropped = 0, 0.0, Counter()
        equal = measured["equal_reward_groups"] * measured["groups"] + dropped[EQUAL]
        found = {"equal_reward_groups_all": equal / max(1.0, measured["groups"] + dropped[EQUAL])}
        if rewards:
            found["reward_mean_all"] = total / rewards
        return found | {f"dropped_groups/{reason}": float(n) for reason, n in sorted(dropped.items()) if n}


class RolloutTotals:
    """What the gateway's engines and episodes spent their time on (`scheduler.policies.limits`)."""

    def __init__(self) -> None:
        self._status: Mapping[str, Any] = {}
        self._before: Mapping[str, float] | None = None

    def update(self, status: Mapping[str, Any]) -> None:
        """Keep the newest status of the gateway."""
        self._status = status
        if self._before is None:
            self._before = status.get("rollout_s", {})

    def figures(self) -> dict[str, float]:
        """Return the seconds since the last step, and the bound on staleness; start the next step."""
        before, self._before = self._before or {}, self._status.get("rollout_s", {})
        return {"eta": float(self._status.get("eta", 0)), **limits.since(before, self._before)}
