"""Deadlines of groups: those whose missing members never come, and the last groups of a stuck batch.

Owns the moments at which each was first seen. They are lost with the process, so the deadlines start again after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from gateway.config.settings import Settings
from gateway.training_feed.ledger import StoredLedger
from scheduler.policies.staleness_events import CloseGroup, Unstick

log = logging.getLogger(__name__)


class GroupDeadlines:
    """Call `sweep` now and then; `ledgers`: of each trained model. Times are seconds of one monotonic clock."""

    def __init__(self, settings: Settings, ledgers: Mapping[str, StoredLedger]) -> None:
        self._settings = settings
        self._ledgers = ledgers
        self._lonely: dict[tuple[str, str], float] = {}
        """Groups (with their model) without a running member, and since when."""
        self._stuck: dict[str, tuple[tuple[str, ...], float]] = {}
        """The groups that each model's leased batch waits for, and since when."""

    async def sweep(self, now: float, running: Collection[tuple[str, str]]) -> None:
        """End what is overdue. `running`: the groups, with their model, that have a training member that runs or is graded."""
        await self._close_lonely(now, running)
        for model in self._ledgers:
            await self._unstick(model, now)

    async def _close_lonely(self, now: float, running: Collection[tuple[str, str]]) -> None:
        """Close groups that wait for members which never come, for example because their driver died."""
        waiting = {
            (model, group.group_id)
            for model, ledger in self._ledgers.items()
            for group in ledger.rule.groups()
            if group.state == "reserved" and (model, group.group_id) not in running
        }
        self._lonely = {key: self._lonely.get(key, now) for key in waiting}
        for (model, group_id), since in self._lonely.items():
            if now - since > self._settings.episodes.idle_s:
                await self._ledgers[model].apply(CloseGroup(group_id, "members_missing"))

    async def _unstick(self, model: str, now: float) -> None:
        """Give up the last groups of the batch that the trainer waits for, if they have run for too long."""
        given, rule = self._settings.staleness_of(model), self._ledgers[model].rule
        if given.on_stuck == "wait":
            return
        groups = rule.stuck(given.on_stuck) if rule.leased else ()
        before, since = self._stuck.get(model, ((), now))
        if not groups or groups != before:
            self._stuck[model] = groups, now
        elif now - since > given.stuck_s:
            log.warning(
                "batch %d of %s is stuck: %s (%s)", rule.next_batch, model, given.on_stuck, ", ".join(groups)
            )
            del self._stuck[model]
            await self._ledgers[model].apply(Unstick(rule.next_batch, given.on_stuck))
