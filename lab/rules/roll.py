"""ROLL: AReaL's budget, batches from the oldest groups on, and what is too old is aborted.

Source: ROLL (arXiv 2506.06122) and ROLL Flash (arXiv 2510.11345), as coded in alibaba/ROLL,
roll/distributed/scheduler/generate_scheduler.py (`ReplayBuffer`: `advance_step`, `get_batch`, `gc`).

`eta` is `async_generation_ratio`, a whole number here. Before step 0, eta * B groups may start, and B more with every step; a
group that is aborted gives its place back. That is AReaL's budget. Groups belong to the step in which they start, which is the
version here.

- Batch b is made of groups of the steps from b - eta on, the oldest step first, and a later step waits while a group of an
  earlier one runs.
- When a version is published, groups of steps before the coming batch - eta are aborted, running or finished. With every group
  rewarded and versions in order there are none: the oldest groups were waited for.

Bounds: live groups, to (eta + 1) * B, and staleness, to eta. The price is that all wait for one long group of an old step.
"""

from __future__ import annotations

from lab.rules.queue import GroupQueue, QueuedGroup
from scheduler.policies.staleness_state import LedgerSettings


class Roll(GroupQueue):
    """A budget of groups, the oldest version first."""

    def __init__(self, settings: LedgerSettings) -> None:
        super().__init__(settings)
        self.max_age = settings.eta

    def quota(self) -> int:
        """Return `batch_size` of the buffer, less running and completed ones."""
        return self.budget(self.settings.eta + 1)

    def rank(self, group: QueuedGroup) -> int:
        """Rank groups by version, the oldest first."""
        return group.version

    def may_enter(self, group: QueuedGroup) -> bool:
        """Return true if no older group runs."""
        return group.version <= self.oldest_running()
