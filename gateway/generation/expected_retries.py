"""Requests that were refused or failed, and whose retries are expected. Owned by `Replies`.

Other processes learn of them through the bus (`Handover.expect`), for the retry may go to any process.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence

from gateway.generation.handover import Handover
from gateway.generation.log_format import LoggedCall

_EXPECTED_S = 60.0
"""Seconds within which a refused request may be retried."""
RequestPlace = tuple[str, str]


class RefusedRequests:
    """The refused requests of this process, by a name for each."""

    def __init__(self, handover: Handover | None) -> None:
        """Without `handover` this process receives every retry."""
        self._handover = handover
        self._arrived: dict[RequestPlace, dict[str, float]] = {}
        """The arrival of each request by place and name, by the monotonic clock."""
        self._until: dict[str, float] = {}
        """The time until which each retry is expected, by name."""

    def expect(self, place: RequestPlace, stored: str, name: str, arrived: float) -> None:
        """Record a refused request, whose key is `stored`."""
        now = time.monotonic()
        self._until = {known: until for known, until in self._until.items() if until > now}
        self._until[name] = now + _EXPECTED_S
        self._arrived.setdefault(place, {})[name] = arrived
        left = {at: self._only(some, self._until) for at, some in self._arrived.items()}
        self._arrived = {at: some for at, some in left.items() if some}
        if self._handover is not None:
            self._handover.expect(place, stored, name, arrived)

    def at(self, place: RequestPlace) -> dict[str, float]:
        """Return the arrival of the refused requests at a place, by name."""
        now = time.monotonic()
        return {n: at for n, at in self._arrived.get(place, {}).items() if self._until.get(n, now) > now}

    def unserved(
        self, expected: dict[str, float], logs: Sequence[LoggedCall], unannounced: Container[str]
    ) -> dict[str, float]:
        """Return the refused requests that no other process has served: they are in the bus, or `unannounced` when the bus was
        read."""
        logged = {at.log.call for at in logs if at.refused}
        return {n: at for n, at in expected.items() if n in logged or n in unannounced}

    def served(self, place: RequestPlace, name: str) -> None:
        """Forget a refused request that has been retried."""
        if self._arrived.get(place, {}).pop(name, None) is not None and self._handover is not None:
            self._handover.end_refused(name)

    @staticmethod
    def _only(some: dict[str, float], names: Container[str]) -> dict[str, float]:
        return {name: at for name, at in some.items() if name in names}
