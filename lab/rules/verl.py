"""verl, fully asynchronous: a window of groups between two updates of the weights, and a queue in order of finishing.

Source: verl's recipe fully_async_policy (volcengine/verl, recipe/fully_async_policy/fully_async_rollouter.py,
`_processor_worker`, `_should_pause_generation`, `reset_staleness`; README.md there). A counter goes up with every sample that
starts, and generation pauses at `int(B * require_batches * (1 + staleness_threshold) * trigger_parameter_sync_step)`. At every
update of the weights it is set to the samples that run or are queued.

`eta` is `staleness_threshold`, in batches: eta * B groups may start beyond the B of the window (verl's own values are
fractions, 0.1 to 0.5). `require_batches` and `trigger_parameter_sync_step` are 1.

The counter is then what is live, plus the batches that were trained since the last update, so the budget is AReaL's. The
difference is the order: the trainer takes groups one by one as they finish, while its batch fills. verl's queue drops its
oldest sample when it is full; it cannot be, being as long as the window. Its samples cannot fail; here a group that is dropped
gives its place back.

Bounds: live groups, to (1 + eta) * B. No group's age, and fast groups are always trained before slow ones.
"""

from __future__ import annotations

from lab.rules.queue import GroupQueue


class Verl(GroupQueue):
    """A budget of groups, first finished, first trained."""

    def quota(self) -> int:
        """Return the window, less the value of its counter."""
        return self.budget(self.settings.eta + 1)
