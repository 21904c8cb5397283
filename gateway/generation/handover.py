"""Logs this process's running calls in the bus, and takes over calls of processes that have died.

Owns this process's heartbeat and the logs of its running calls. New tokens of all calls are written together, shortly after they
arrived. Invariants:
- a stream delivers only logged tokens, so a process that takes the call over continues after everything that a client has;
- only its owner writes a log; a process whose call was taken over neither delivers nor records any more of it;
- no call is taken over within `[bus] heartbeat_ttl_s` of its process's last heartbeat; after that time the process checks the
  bus before it records;
- if the bus is unavailable or has lost its data, calls continue as if there were no bus, and are logged again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from gateway.bus.base import Bus, Entry, Log, Outcome, Process
from gateway.config import BusSettings
from gateway.generation import log_format
from gateway.generation.call_log import CallLog, Logged
from gateway.generation.log_format import LoggedCall
from gateway.trajectories.recorder import TurnDetails
from gateway.trajectories.turn import Turn
from headgate.errors import BusUnavailable
from headgate.types import ImageSpan, Int32Array

log = logging.getLogger(__name__)
_LOG_EVERY_S = 0.025
"""Seconds between two writes of the new tokens of all running calls. A stream delivers only logged tokens, so it is delayed by up
to this time."""

_BEAT_S = 1.0
_ANY_PROCESS = Process("any-process")
"""The owner of the logs of refused requests: any process may receive a retry, so each of them may end these logs."""
_ENTRIES_PER_S = 4000
"""Bounds the time that logging takes: the more calls run, the less often each is logged."""


class Handover:
    """The running calls of this process in the bus. Start it before the first call, and close it after the last."""

    def __init__(self, bus: Bus, process: Process, settings: BusSettings) -> None:
        self.process = process
        self._bus = bus
        self._settings = settings
        self._logs: dict[str, CallLog] = {}
        self._dirty: dict[CallLog, None] = {}
        self._later: dict[CallLog, None] = {}
        """Entries that the bus missed; they are sent with the next heartbeat."""
        self.announcing: set[str] = set()
        """Refused requests that other processes do not know of yet."""
        self._marked = asyncio.Event()
        self._writing = asyncio.Lock()
        self._alive_until = 0.0
        """The time (by the loop's clock) until which no other process takes a call from this one."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False

    async def start(self) -> None:
        """Announce this process as alive, and start the heartbeat."""
        self._open = True
        await self._beat()
        self._keep(asyncio.create_task(self._beat_forever(), name="bus-heartbeat"))
        self._keep(asyncio.create_task(self._write_forever(), name="bus-log"))

    async def close(self) -> None:
        """Withdraw this process from the bus. The logs of its calls end, except those left for others (`leave`)."""
        await self.flush()
        self._open = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        try:
            await self._bus.leave(self.process)
        except BusUnavailable:
            log.info(
                "the bus is unavailable: other processes wait %g s for this one",
                self._settings.heartbeat_ttl_s,
            )

    def follow(
        self,
        place: tuple[str, str],
        call: Logged,
        turn: Turn,
        prompt: Int32Array,
        details: TurnDetails,
        epoch: int = 1,
        images: Sequence[ImageSpan] = (),
    ) -> CallLog:
        """Log a call until `CallLog.end`."""
        call_log = CallLog(self, _place(place), call, turn, prompt, details, epoch, images)
        self._logs[call_log.call_id] = call_log
        self.mark_dirty(call_log)
        return call_log

    async def leave(self) -> None:
        """Leave the logs of the running calls for other processes to take over."""
        for call_log in self._logs.values():
            self._dirty[call_log] = None
        if await self.flush():
            for call_log in self._logs.values():
                call_log.leave()

    async def alive(self, process_id: str) -> bool:
        """Return true if a process has sent a heartbeat recently, or the bus is unavailable."""
        try:
            return await self._bus.address_of(process_id) is not None
        except BusUnavailable:
            return True

    async def find(self, place: tuple[str, str]) -> list[LoggedCall] | None:
        """Return the running calls and refused requests of every process at a place; None while the bus is unavailable."""
        try:
            logs = await self._bus.find(_place(place))
        except BusUnavailable:
            return None
        return [call for log in logs if (call := _read(log)) is not None]

    def can_take_over(self, call: LoggedCall) -> bool:
        """Return true if the call's process is dead and another process can continue the call.

        Output that a stream delivered while the bus was unavailable is not logged, so a call with such output starts over.
        """
        if call.log.url is not None or call.details is None:
            return False
        return not call.details.stream or call.log.age_s < self._bus.unbroken_s

    async def take_over(self, call: LoggedCall) -> bool:
        """Take over a call of a dead process. False: another process was faster, or the bus is unavailable."""
        try:
            return await self._bus.take_over(call.log, self.process)
        except BusUnavailable:
            return False

    async def drop(self, call: LoggedCall) -> None:
        """End the log of a call that was taken over and is not continued after all."""
        over = Entry(call.log.call, "", call.log.epoch + 1, b"", b"", 0, b"", over=True)
        try:
            await self._bus.write(self.process, [over])
        except BusUnavailable:
            log.info("call %s: its log stays until it is forgotten", call.log.call)

    def expect(self, place: tuple[str, str], request_key: str, name: str, arrived: float) -> None:
        """Announce to other processes a refused request, which may be retried at any of them."""
        head = log_format.head_of_refused(request_key, time.monotonic() - arrived)
        self.announcing.add(name)
        writing = self._write_refused(Entry(name, _place(place), 1, head, b"", 0, b""))
        if writing is None:
            self.announcing.discard(name)
        else:
            writing.add_done_callback(lambda _: self.announcing.discard(name))

    def end_refused(self, name: str) -> None:
        """End the log of a refused request that was retried."""
        self._write_refused(Entry(name, "", 1, b"", b"", 0, b"", over=True))

    def _write_refused(self, entry: Entry) -> asyncio.Task[None] | None:
        async def write() -> None:
            async with self._writing:
                try:
                    await self._bus.write(_ANY_PROCESS, [entry])
                except BusUnavailable:
                    log.info("the bus is unavailable: other processes do not know of a refused request")

        return self._keep(asyncio.create_task(write(), name="bus-refused")) if self._open else None

    def mark_dirty(self, call_log: CallLog) -> bool:
        """Schedule a call's new tokens for the log; called for every chunk. False: the handover is closed, and nothing is
        logged."""
        if self._open and call_log not in self._dirty:
            self._dirty[call_log] = None
            self._marked.set()
        return self._open

    async def assert_owner(self, call_log: CallLog) -> None:
        """Check that the log is still this process's, unless its heartbeat is recent enough to be sure."""
        alive_s = self._alive_until - asyncio.get_running_loop().time()
        if alive_s < self._settings.heartbeat_ttl_s / 3:
            self._dirty[call_log] = None
            await self.flush()

    async def flush(self) -> bool:
        """Write the new tokens of all marked calls. False: the bus is unavailable, and pending output is delivered unlogged."""
        async with self._writing:
            logs, self._dirty = list(self._dirty), {}
            if not logs:
                return True
            for call_log in logs:
                call_log.call.stage()
            began = asyncio.get_running_loop().time()
            try:
                try:
                    await self._write(logs)
                except BusUnavailable as error:
                    if not error.stood_still:
                        raise
                    # Other processes may have taken these calls over while this one was suspended
                    await self._write(logs)
            except Exception as error:
                if not isinstance(error, BusUnavailable):
                    log.exception("%d running calls could not be logged", len(logs))
                self._missed(logs, began)
                return False
            return True

    async def _write(self, logs: Sequence[CallLog]) -> None:
        """Write the next entries of calls, and apply their outcomes. Raise BusUnavailable."""
        began = asyncio.get_running_loop().time()
        outcomes = await self._bus.write(self.process, [call_log.entry() for call_log in logs])
        self._alive_until = began + self._settings.heartbeat_ttl_s
        for call_log, outcome in zip(logs, outcomes, strict=True):
            self._ack(call_log, outcome, began)

    def _ack(self, call_log: CallLog, outcome: Outcome, now: float) -> None:
        ended = call_log.ended
        call_log.ack(outcome, now)
        if (ended and outcome == "written") or call_log.taken_over:
            self._logs.pop(call_log.call_id, None)
        if call_log.taken_over and not ended:
            log.warning("call %s: another process has taken it over", call_log.call_id)
            self._keep(asyncio.create_task(call_log.call.supersede(), name=f"supersede-{call_log.call_id}"))

    def _missed(self, logs: Sequence[CallLog], now: float) -> None:
        """Let calls continue while the bus is unavailable; their entries are tried again at the next heartbeat."""
        for call_log in logs:
            call_log.call.flush()
            expired = call_log.written_at + self._settings.log_s < now
            if call_log.ended and expired:
                self._logs.pop(call_log.call_id, None)
            else:
                self._later[call_log] = None

    async def _beat(self) -> None:
        now = asyncio.get_running_loop().time()
        for call_log in self._logs.values():
            if now - call_log.written_at > self._settings.log_s / 3:
                self._dirty[call_log] = None
        self._dirty |= self._later
        self._later = {}
        if self._dirty:
            self._marked.set()
        try:
            await self._bus.announce(self.process)
            self._alive_until = max(self._alive_until, now + self._settings.heartbeat_ttl_s)
        except BusUnavailable:
            return  # the bus has already logged it

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(min(_BEAT_S, self._settings.heartbeat_ttl_s / 3))
            await self._beat()

    async def _write_forever(self) -> None:
        while True:
            await self._marked.wait()
            self._marked.clear()
            entries = len(self._dirty)
            await self.flush()
            await asyncio.sleep(max(_LOG_EVERY_S, entries / _ENTRIES_PER_S))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())


def _place(place: tuple[str, str]) -> str:
    return ":".join(place)


def _read(found: Log) -> LoggedCall | None:
    try:
        call = log_format.read(found)
    except (ValueError, KeyError, TypeError):
        call = None
    if call is None:
        log.info("call %s: its log is not whole, or of another build", found.call)
    return call
