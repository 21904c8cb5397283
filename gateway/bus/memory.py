"""A bus in this process's memory. Several gateways of one test share one by sharing the object."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from gateway.bus.base import Entry, Log, Outcome, Process
from gateway.config import BusSettings


@dataclass(slots=True)
class _StoredLog:
    """A log as it is kept."""

    owner: str
    epoch: int
    place: str
    head: bytes
    """Empty if the log was taken and is over."""
    state: bytes
    body: bytearray
    written_at: float


class MemoryBus:
    """A bus in this process's memory."""

    def __init__(
        self, settings: BusSettings, *, shared: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shared = shared
        self._settings = settings
        self._clock = clock
        self._alive: dict[str, tuple[str, float]] = {}
        self._logs: dict[str, _StoredLog] = {}
        self._values: dict[str, tuple[bytes, float]] = {}
        self._listeners: list[tuple[tuple[str, ...], asyncio.Queue[tuple[str, bytes]]]] = []

    @property
    def unbroken_s(self) -> float:
        return math.inf

    async def announce(self, process: Process) -> None:
        now = self._clock()
        self._alive = {id: known for id, known in self._alive.items() if known[1] > now}
        self._alive[process.id] = process.url, now + self._settings.heartbeat_ttl_s

    async def leave(self, process: Process) -> None:
        self._alive.pop(process.id, None)

    async def address_of(self, process_id: str) -> str | None:
        url, until = self._alive.get(process_id, ("", -math.inf))
        return url if until > self._clock() else None

    async def write(self, process: Process, entries: Sequence[Entry]) -> list[Outcome]:
        await self.announce(process)
        self._expire()
        return [self._write(process, entry) for entry in entries]

    def _write(self, process: Process, entry: Entry) -> Outcome:
        kept = self._logs.get(entry.call)
        if kept is not None and (kept.owner, kept.epoch) != (process.id, entry.epoch):
            return "taken"
        if entry.over:
            self._logs.pop(entry.call, None)
            if entry.epoch > 1:
                self._logs[entry.call] = _StoredLog(
                    owner=process.id,
                    epoch=entry.epoch,
                    place="",
                    head=b"",
                    state=b"",
                    body=bytearray(),
                    written_at=self._clock(),
                )
        elif entry.head:
            self._logs[entry.call] = _StoredLog(
                owner=process.id,
                epoch=entry.epoch,
                place=entry.place,
                head=entry.head,
                state=entry.state,
                body=bytearray(entry.body),
                written_at=self._clock(),
            )
        elif kept is None or len(kept.body) < entry.at:
            return "gone"
        else:
            kept.body[entry.at : entry.at + len(entry.body)] = entry.body
            kept.state, kept.written_at = entry.state, self._clock()
        return "written"

    async def find(self, place: str) -> list[Log]:
        self._expire()
        return [
            Log(
                call=call,
                owner=kept.owner,
                epoch=kept.epoch,
                url=await self.address_of(kept.owner),
                head=kept.head,
                state=kept.state,
                body=bytes(kept.body),
                age_s=self._clock() - kept.written_at,
            )
            for call, kept in sorted(self._logs.items())
            if kept.head and kept.place == place
        ]

    async def take_over(self, log: Log, process: Process) -> bool:
        self._expire()
        kept = self._logs.get(log.call)
        alive = await self.address_of(log.owner) is not None
        if kept is None or not kept.head or alive or (kept.owner, kept.epoch) != (log.owner, log.epoch):
            return False
        await self.announce(process)
        kept.owner, kept.epoch, kept.written_at = process.id, log.epoch + 1, self._clock()
        return True

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        now = self._clock()
        self._values = {name: known for name, known in self._values.items() if known[1] > now}
        self._values[key] = value, now + ttl_s

    async def get(self, key: str) -> bytes | None:
        value, until = self._values.get(key, (b"", -math.inf))
        return value if until > self._clock() else None

    async def publish(self, topic: str, message: bytes = b"") -> None:
        for topics, queue in self._listeners:
            if topic in topics:
                queue.put_nowait((topic, message))

    async def listen(self, *topics: str) -> AsyncGenerator[tuple[str, bytes], None]:
        queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._listeners.append((topics, queue))
        try:
            for topic in topics:
                yield topic, b""
            while True:
                yield await queue.get()
        finally:
            self._listeners.remove((topics, queue))

    async def close(self) -> None: ...

    def flush(self) -> None:
        """Lose everything, as a Redis server's FLUSHALL would."""
        self._alive.clear()
        self._logs.clear()
        self._values.clear()

    def _expire(self) -> None:
        oldest = self._clock() - self._settings.log_s
        for call in [call for call, kept in self._logs.items() if kept.written_at <= oldest]:
            del self._logs[call]
