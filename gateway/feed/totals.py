"""What the groups of a ledger came to, before any filter: a function of its events alone, so the same after a restart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Totals:
    """Since the beginning of the ledger."""

    rewards: int = 0
    """Episodes that were rewarded, whatever became of their groups."""
    reward_sum: float = 0.0
    groups: Counter[str] = field(default_factory=Counter)
    """Groups that are over: `batch` for those that got a place in a batch, else the reason why they were dropped."""

    def rewarded(self, value: float | None) -> None:
        """Count a reward; None: its value was not recorded."""
        if value is not None:
            self.rewards += 1
            self.reward_sum += value

    def to_json(self) -> dict[str, Any]:
        """Return the totals as a JSON object."""
        return {"rewards": self.rewards, "reward_sum": self.reward_sum, "groups": dict(self.groups)}
