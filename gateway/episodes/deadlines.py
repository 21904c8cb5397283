"""Deadlines: of episodes, of groups whose missing members never come, and of the last groups of a stuck batch.

Owns the times of ended episodes, and the moments at which each group was first seen. They are lost with the process, so the
deadlines start again after a restart.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping

from gateway.config.settings import Settings
from gateway.episodes.open_episode import OpenEpisode
from gateway.training_feed.ledger import StoredLedger
from scheduler.policies.overdue import LEAST_S, EpisodeLimit, SlowEpisode, UsualTimes
from scheduler.policies.staleness_events import CloseGroup, Unstick

log = logging.getLogger(__name__)


class EpisodeDeadlines:
    """How long each open episode may be silent, and may run. Times are seconds of one monotonic clock."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._least_s = settings.episodes.total_s or LEAST_S
        """No episode ends sooner, so a sweep computes no limit for most."""
        self._times: defaultdict[str, UsualTimes] = defaultdict(UsualTimes)

    def record(self, episode: OpenEpisode, now: float) -> None:
        """Record that an episode's run ended regularly."""
        self._times[episode.model].record(episode.group_id, now - episode.opened_at)

    def retain(self, episodes: Collection[OpenEpisode]) -> None:
        """Forget the groups of which no episode is open."""
        groups = {(one.model, one.group_id) for one in episodes}
        for model, times in self._times.items():
            times.retain({group for group_model, group in groups if group_model == model})

    def missed_deadline(self, episode: OpenEpisode, now: float) -> str:
        """Return the deadline that an episode missed, or an empty string. Log the setting that allows more."""
        if now - episode.last_used_at > self._idle_s(episode):
            # Silence is the regular end of a conversation that a call opened.
            log.log(
                logging.INFO if episode.opening else logging.WARNING,
                "episode %s is closed: no call for %g s ([episodes] idle_s)",
                episode.id,
                self._idle_s(episode),
            )
            return "idle_deadline"
        running_s = now - episode.opened_at
        if running_s <= self._least_s or running_s <= (limit := self._limit(episode)).limit_s:
            return ""
        usual = f", and such episodes usually take {limit.usual_s:.0f} s" if limit.usual_s is not None else ""
        log.warning(
            "episode %s is closed: it has run for %.0f s%s; for agents that rightly take longer, set [episodes] total_s",
            *(episode.id, running_s, usual),
        )
        return "total_deadline"

    def slow(self, episodes: Collection[OpenEpisode], model: str, now: float) -> list[SlowEpisode]:
        """Return a model's training episodes that have used up half of their time, the next to be closed first."""
        found = []
        for one in episodes:
            if one.model != model or one.mode != "train":
                continue
            limit, running_s = self._limit(one), now - one.opened_at
            if running_s > limit.limit_s / 2:
                found.append(SlowEpisode(one.id, one.group_id, running_s, limit.usual_s, limit.limit_s))
        return sorted(found, key=lambda one: one.limit_s - one.running_s)

    def _limit(self, episode: OpenEpisode) -> EpisodeLimit:
        if (total := self._settings.episodes.total_s) is not None:
            return EpisodeLimit(total, None)
        return self._times[episode.model].limit(episode.group_id)

    def _idle_s(self, episode: OpenEpisode) -> float:
        agent = self._settings.agents.get(episode.agent) if episode.opening else None
        return (agent and agent.idle_s) or self._settings.episodes.idle_s


class GroupDeadlines:
    """Call `sweep` now and then; `ledgers`: of each trained model. Times are seconds of one monotonic clock."""

    def __init__(self, settings: Settings, ledgers: Mapping[str, StoredLedger]) -> None:
        self._settings = settings
        self._ledgers = ledgers
        self._without_member: dict[tuple[str, str], float] = {}
        """Groups (with their model) without a running member, and since when."""
        self._left: set[tuple[str, str]] = set()
        """Groups whose driver ended before them."""
        self._stuck: dict[str, tuple[tuple[str, ...], float]] = {}
        """The groups that each model's leased batch waits for, and since when."""

    def leave(self, model: str, group_id: str) -> None:
        """Record that a group's driver has ended, so that nothing opens the members that are missing."""
        self._left.add((model, group_id))

    async def sweep(self, now: float, running: Collection[tuple[str, str]]) -> None:
        """End what is overdue. `running`: the groups, with their model, that have a training member that runs or is graded."""
        await self._close_memberless(now, running)
        for model in self._ledgers:
            await self._unstick(model, now)

    async def _close_memberless(self, now: float, running: Collection[tuple[str, str]]) -> None:
        """Close groups that wait for members which never come, for example because their driver died."""
        reserved = {
            (model, group.group_id)
            for model, ledger in self._ledgers.items()
            for group in ledger.rule.groups()
            if group.state == "reserved"
        }
        self._left &= reserved
        waiting = reserved.difference(running)
        self._without_member = {key: self._without_member.get(key, now) for key in waiting}
        for (model, group_id), since in self._without_member.items():
            if (model, group_id) in self._left or now - since > self._settings.episodes.idle_s:
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
