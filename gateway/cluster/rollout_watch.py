"""Adds up what engines and episodes of each trained model do, for what limits the run (`scheduler.policies.limits`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from gateway.control.coordinator_placement import ControlPlacement
from gateway.episodes.episodes import Episodes
from gateway.training_feed.ledger import StoredLedger
from scheduler.policies.limits import RolloutSeconds

_FULL = ("READY", "READY_WITH_CAPACITY")


class RolloutWatch:
    """The seconds of each model since this process became the coordinator."""

    def __init__(
        self,
        placements: Mapping[str, ControlPlacement],
        ledgers: Mapping[str, StoredLedger],
        episodes: Episodes,
    ) -> None:
        self._placements = placements
        self._ledgers = ledgers
        self._episodes = episodes
        self._last = time.monotonic()
        self._seconds = {name: RolloutSeconds() for name in ledgers}

    async def tend(self) -> None:
        """Count the time since the last call; call it once a second."""
        before, self._last = self._last, time.monotonic()
        open_episodes = Counter(live.model for live in self._episodes.live())
        for name, ledger in self._ledgers.items():
            engines, waiting = self._placements[name].load()
            filling = any(row.state not in _FULL for row in ledger.rule.batches())
            eta = ledger.rule.settings.eta
            more_calls = (eta + 2) / (eta + 1) if self._episodes.waiting(name) else 1.0
            episodes = open_episodes[name]
            self._seconds[name].add(self._last - before, engines, waiting, episodes, filling, more_calls)

    def seconds(self, model: str) -> dict[str, float]:
        """Return the seconds of a trained model so far, by their names."""
        return asdict(self._seconds[model])
