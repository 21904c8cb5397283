"""Figures of all groups that ended, those included that the gateway leaves out of batches (`[staleness] drop_equal`, ...).

The figures of a batch are of the groups that are left. Compares the gateway's totals before and after a step. Pure: no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

EQUAL = "zero_variance"
"""The reason for which the gateway drops groups of equal rewards."""


class Settled:
    """The groups and rewards of a run before filters, step by step."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] | None = None
        self._rewards = 0
        self._reward_sum = 0.0
        self._dropped: Counter[str] = Counter()

    def look(self, totals: Mapping[str, Any]) -> None:
        """Take the gateway's totals since the beginning of its ledger."""
        before = totals if self._before is None else self._before
        self._before = totals
        if not totals or totals["rewards"] < before.get("rewards", 0):  # another ledger
            return
        self._rewards += totals["rewards"] - before["rewards"]
        self._reward_sum += totals["reward_sum"] - before["reward_sum"]
        self._dropped += Counter(totals["groups"]) - Counter(before["groups"])
        del self._dropped["batch"]

    def figures(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Return the figures since the last step, given those of its batch; starts the next step."""
        rewards, total, dropped = self._rewards, self._reward_sum, self._dropped
        self._rewards, self._reward_sum, self._dropped = 0, 0.0, Counter()
        equal = measured["equal_reward_groups"] * measured["groups"] + dropped[EQUAL]
        found = {"equal_reward_groups_all": equal / max(1.0, measured["groups"] + dropped[EQUAL])}
        if rewards:
            found["reward_mean_all"] = total / rewards
        return found | {f"dropped_groups/{reason}": float(n) for reason, n in sorted(dropped.items()) if n}
