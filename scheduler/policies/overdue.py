"""How long an episode may run: a multiple of the time that such episodes usually take. Pure.

One member that never ends holds its group, its batch and, by the bound on staleness, all training. A fixed limit either waits for
hours or ends agents that are slow by nature, so the limit follows the episodes that have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

FACTOR = 10.0
LEAST_S = 600.0
"""The limit is never shorter: queues and updates make short episodes vary."""
FIRST_S = 3600.0
"""The limit while no episode has ended."""
_NEWEST = 64


@dataclass(frozen=True, slots=True)
class EpisodeLimit:
    """Seconds."""

    limit_s: float
    usual_s: float | None
    """What the limit is a multiple of; None: it is fixed."""


@dataclass(frozen=True, slots=True)
class SlowEpisode:
    """An episode that has used up half of its time. Times are in seconds."""

    episode_id: str
    group_id: str
    running_s: float
    usual_s: float | None
    """How long such episodes usually take; None: none has ended, or the limit is `[episodes] total_s`."""
    limit_s: float
    """It is closed after this time."""


class UsualTimes:
    """The times of one model's episodes that have ended."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=_NEWEST)
        self._median: float | None = None
        """Of the newest times; kept, because each sweep compares every open episode with it. None: there are none."""
        self._longest: dict[str, float] = {}
        """The longest of each group that still runs."""

    def record(self, group: str, seconds: float) -> None:
        """Add an episode that ended regularly."""
        self._newest.append(seconds)
        self._median = median(self._newest)
        self._longest[group] = max(seconds, self._longest.get(group, 0.0))

    def retain(self, groups: Collection[str]) -> None:
        """Forget all groups but these."""
        self._longest = {group: s for group, s in self._longest.items() if group in groups}

    def limit(self, group: str) -> EpisodeLimit:
        """Return the limit of a group's episodes.

        It is `FACTOR` times the larger of the group's longest time and the median of the newest ones.
        """
        if self._median is None:
            return EpisodeLimit(FIRST_S, None)
        usual = max(self._median, self._longest.get(group, 0.0))
        return EpisodeLimit(max(LEAST_S, FACTOR * usual), usual)
