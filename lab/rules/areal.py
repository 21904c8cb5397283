"""AReaL: as many groups may start as would be trained up to eta versions later. Their number is bounded, their age is not.

Source: AReaL (arXiv 2505.24298: sample number n may start if floor((n - 1) / B) <= version + eta), as coded in
inclusionAI/AReaL, areal/infra/staleness_manager.py (`get_capacity`) and workflow_executor.py (`wait_results`).

`eta` is its `max_staleness` (`max_head_offpolicyness` in its configuration). With `accepted` the groups that ever finished:

    capacity = (eta + version + 1) * B - (accepted + running)

`version * B` of the accepted ones were trained, so this is (eta + 1) * B less the live ones. The second form is the one used,
for it also holds where version numbers were skipped. AReaL's further limit `max_concurrent_rollouts` belongs to the engines
here.

Once B groups are finished and the trainer waits, it takes together the B groups that were started first. (AReaL shuffles
them before it trains; the trainer's own order decides here.)

Bounds: live groups, to (eta + 1) * B. A group that runs long can be overtaken by any number of younger ones and is trained
however old.
"""

from __future__ import annotations

from lab.rules.queue import GroupQueue, QueuedGroup


class Areal(GroupQueue):
    """A budget of groups, and batches of those that were started first."""

    def quota(self) -> int:
        """Return `get_capacity` without its limit of concurrency."""
        return self.budget(self.settings.eta + 1)

    def rank(self, group: QueuedGroup) -> int:
        """Rank groups by their start, the first in front."""
        return group.number

    def may_enter(self, group: QueuedGroup) -> bool:
        """Return true once the finished groups fill a batch, which is taken whole."""
        return self.untrained >= self.batch
