"""The queue of waiting calls: a waterfall over versions (StaleFlow, arXiv 2601.12784).

Calls are ordered by their `min_version`, oldest first. The first call goes to the best engine among those whose version is at
least its `min_version` (`placement.py`). If none has room for it, it waits here, not in an engine's queue, and so do all later
calls: none overtakes one that must be trained sooner. Of one `min_version` the first to arrive comes first.

Calls that wait in other processes have their place in the same order, by the last snapshot: room for those with an older
`min_version` is counted before a call of this process is placed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.policies.open_engines import Engines
from scheduler.policies.placement import EngineRequest


@dataclass(frozen=True, slots=True)
class PeerBacklog:
    """Calls of one `min_version` that wait in other processes, as an `EngineRequest` of mean length."""

    version: int
    length: int
    calls: int
    call: str = ""
    cached_in: str = ""
    cached: int = 0
    avoid: tuple[str, ...] = ()
    preferred: str = ""


class Waterfall:
    """The waiting calls, and their placement."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.waiting: dict[str, EngineRequest] = {}
        self._queues: dict[int, deque[EngineRequest]] = {}
        """The waiting calls, by `min_version`."""
        self._peer_backlog: dict[int, PeerBacklog] = {}
        """Calls that wait in other processes, by `min_version`, without those for which room was counted."""

    def add(self, request: EngineRequest) -> None:
        """Add a waiting call. Raise ValueError if it waits already."""
        if request.call in self.waiting:
            raise ValueError(f"call {request.call} waits already")
        self.waiting[request.call] = request
        self._queues.setdefault(request.version, deque()).append(request)

    def drop(self, call: str) -> bool:
        """Remove a waiting call; return True if it was waiting."""
        return self.waiting.pop(call, None) is not None

    def set_peer_backlog(self, queues: Iterable[PeerBacklog]) -> None:
        """Set the calls that wait in other processes, by a snapshot."""
        self._peer_backlog = {queue.version: queue for queue in queues}

    def next_calls(self) -> list[EngineRequest]:
        """Return the first call of each `min_version`, including those of other processes, oldest version first."""
        own = (self._first(self._queues[version]) for version in sorted(self._queues))
        found = [*(request for request in own if request is not None), *self._peer_backlog.values()]
        return sorted(found, key=lambda request: request.version)

    def place(self) -> list[tuple[EngineRequest, str]]:
        """Place calls in order while engines have room; return each with its engine."""
        placed: list[tuple[EngineRequest, str]] = []
        if not self.waiting:
            self._queues.clear()
            return placed
        for version in sorted(self._queues):
            if self._count_peers_before(version) and self._place_queue(self._queues[version], placed):
                del self._queues[version]
            elif self.engines.candidate is None:  # otherwise calls of the version on trial have other engines
                break
        return placed

    def _count_peers_before(self, version: int) -> bool:
        """Count room for the calls of other processes that precede this `min_version`; return false if there is too little."""
        for older in sorted(v for v in self._peer_backlog if v < version):
            queue = self._peer_backlog[older]
            counted = next(
                (n for n in range(queue.calls) if not self.engines.count_elsewhere(queue)), queue.calls
            )
            if counted < queue.calls:
                self._peer_backlog[older] = replace(queue, calls=queue.calls - counted)
                return False
            del self._peer_backlog[older]
        return True

    def _first(self, queue: deque[EngineRequest]) -> EngineRequest | None:
        while queue and self.waiting.get(queue[0].call) is not queue[0]:
            queue.popleft()
        return queue[0] if queue else None

    def _place_queue(self, queue: deque[EngineRequest], placed: list[tuple[EngineRequest, str]]) -> bool:
        """Place the calls of a queue; return True if none is left."""
        while (request := self._first(queue)) is not None:
            engine = self.engines.best(request)
            if engine is None:
                return False
            queue.popleft()
            del self.waiting[request.call]
            self.engines.add_call(engine.name, request.version, request.length)
            placed.append((request, engine.name))
        return True
