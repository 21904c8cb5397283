"""The calls that wait, and which is next: a waterfall over versions (StaleFlow, arXiv 2601.12784).

Calls wait by their `min_version`, oldest first. The call whose turn it is goes to the best engine among those whose version
is at least that (`placement.py`); where none has room for it, it waits here, not in an engine's queue, and so does every later
call: none overtakes one that must be trained sooner. Of one `min_version` those that are expected to be longest come first
(LPT: what begins late has the least time), among as many as come one after another (`_AMONG`); so no call is overtaken for ever.

Calls that wait in other processes stand in the same order, as far as the last snapshot knows: those with an older `min_version`
have their place in an engine counted before a call of this process gets one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.policies.placement import EngineRequest, Engines, footprint

_AMONG = 1024
_Entry = tuple[int, int, int, EngineRequest]
"""The arrival batch (of `_AMONG` calls), longest first within it, first come first served between batches."""


@dataclass(frozen=True, slots=True)
class PeerBacklog:
    """Calls of one `min_version` that wait in other processes, as a request of one of them: of mean length, and nothing else is
    known."""

    version: int
    length: int
    calls: int
    call: str = ""
    expected: int = 0
    near: str = ""
    cached: int = 0
    avoid: tuple[str, ...] = ()
    to: str = ""


class Waterfall:
    """The calls that wait, and how they are poured into engines."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.waiting: dict[str, EngineRequest] = {}
        self._queues: dict[int, list[_Entry]] = {}
        """The calls that wait, by `min_version`."""
        self._elsewhere: dict[int, PeerBacklog] = {}
        """Calls that wait in other processes, by `min_version`, less those whose place was counted."""
        self._serials = itertools.count()

    def add(self, request: EngineRequest) -> None:
        """Add a waiting call. Raise ValueError if it waits already."""
        if request.call in self.waiting:
            raise ValueError(f"call {request.call} waits already")
        self.waiting[request.call] = request
        serial = next(self._serials)
        entry = (serial // _AMONG, -request.expected, serial, request)
        heapq.heappush(self._queues.setdefault(request.version, []), entry)

    def drop(self, call: str) -> bool:
        """Remove a waiting call; return True if it was waiting."""
        return self.waiting.pop(call, None) is not None

    def elsewhere(self, queues: Iterable[PeerBacklog]) -> None:
        """Apply the calls that wait in other processes, by a snapshot."""
        self._elsewhere = {queue.version: queue for queue in queues}

    def heads(self) -> list[EngineRequest]:
        """Return the calls whose turn it is, those of other processes too, oldest version first."""
        found = (self._head(self._queues[version]) for version in sorted(self._queues))
        heads = [*(request for request in found if request is not None), *self._elsewhere.values()]
        return sorted(heads, key=lambda request: request.version)

    def pour(self) -> list[tuple[EngineRequest, str]]:
        """Place calls while engines have room for those whose turn it is."""
        placed: list[tuple[EngineRequest, str]] = []
        if not self.waiting:
            self._queues.clear()
            return placed
        for version in sorted(self._queues):
            if not self._count_elsewhere(version) or not self._drain(self._queues[version], placed):
                break
            del self._queues[version]
        return placed

    def _count_elsewhere(self, version: int) -> bool:
        """Count the calls of other processes that go before those of this `min_version`; False if not all of them find room."""
        for older in sorted(v for v in self._elsewhere if v < version):
            queue = self._elsewhere[older]
            counted = next((n for n in range(queue.calls) if not self.engines.elsewhere(queue)), queue.calls)
            if counted < queue.calls:
                self._elsewhere[older] = replace(queue, calls=queue.calls - counted)
                return False
            del self._elsewhere[older]
        return True

    def _head(self, queue: list[_Entry]) -> EngineRequest | None:
        while queue and self.waiting.get(queue[0][3].call) is not queue[0][3]:
            heapq.heappop(queue)
        return queue[0][3] if queue else None

    def _drain(self, queue: list[_Entry], placed: list[tuple[EngineRequest, str]]) -> bool:
        """Place the calls of a queue; return True if none is left."""
        while (request := self._head(queue)) is not None:
            engine = self.engines.best(request)
            if engine is None:
                return False
            heapq.heappop(queue)
            del self.waiting[request.call]
            self.engines.begun(engine.name, request.version, footprint(request))
            placed.append((request, engine.name))
        return True
