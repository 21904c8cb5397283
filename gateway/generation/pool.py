"""One model's engines, and the calls that run in them or wait for one.

Calls wait here, never in the queue of a paused engine. The placer (`slot_placer.py`) chooses each call's engine, and the control
program sets each engine's state.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypedDict

from gateway.config import QueueSettings
from gateway.generation.call import Call
from gateway.generation.pace import Pace
from gateway.generation.plan_messages import CallCounts, count_calls
from gateway.generation.slot import EngineDescription, Run, Slot
from gateway.generation.slot_placer import PlacementRequest, Placer, SlotPlacer
from gateway.generation.trial import Trial
from headgate.errors import BadRequest, Conflict, NotFound, Unavailable, jittered

log = logging.getLogger(__name__)

_REMEMBERED = 10_000
"""Episodes whose last engine is remembered."""
_WOKEN_PER_TURN = 4
"""Hundreds of calls that continue at the same moment would delay reading those that run."""


class CallDescription(TypedDict):
    """A call that runs or waits, as the admin API returns it."""

    call_id: str
    episode_id: str
    model: str
    engine: str | None
    tokens: int
    pinned: bool


class EngineMonitor(Protocol):
    """Receives reports of engines that fail the calls of this process."""

    def unreachable(self, model: str, slot: Slot) -> None:
        """Handle a request that could not reach the engine, or lost it."""
        ...

    def disputed(self, model: str, slot: Slot, reason: str) -> None:
        """Handle an engine that reports another version than it should have, or does not respond."""
        ...


class NoMonitor:
    """Ignores the reports."""

    def unreachable(self, model: str, slot: Slot) -> None:
        pass

    def disputed(self, model: str, slot: Slot, reason: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Cached:
    """The engine that ran an episode's last turn, and the tokens that it has cached of it."""

    slot: str
    generation: int
    tokens: int


class EnginePool:
    """Gives calls open engines, and lets calls wait while none is open."""

    def __init__(self, model: str, queue: QueueSettings, pace: Pace | None = None) -> None:
        """`pace` is shared by all pools of a process."""
        self.model = model
        self.pace = pace or Pace()
        self.slots: dict[str, Slot] = {}
        self.calls: dict[str, Call] = {}
        """Calls that run in an engine or wait for one."""
        self.waiting = 0
        self.trial: Trial | None = None
        """The version that a share of the new conversations tries; only the coordinator knows."""
        self._queue = queue
        self._monitor: EngineMonitor = NoMonitor()
        self._placer: Placer = SlotPlacer(self)
        self._requests: dict[str, PlacementRequest] = {}
        """The requests of calls without an engine, by call id."""
        self._changed = asyncio.Event()
        self._turns: deque[Callable[[], bool]] = deque()
        """Callbacks that wake waiting calls, a few at each turn of the event loop; each returns True if it woke one."""
        self._waking = False
        self._cached: OrderedDict[str, _Cached] = OrderedDict()

    async def acquire(self, call: Call) -> Slot:
        """Wait for an open engine whose version may sample the call. The caller must `release` it.

        Raise Unavailable if the wait was too long, or if too many calls wait already and this one has not begun.
        """
        try:
            async with asyncio.timeout(self._queue.max_wait_s):
                while True:
                    slot = await self._place(call)
                    if slot.state == "open" and slot.version >= call.min_version:
                        return slot
                    self._placer.changed()  # the engine has changed since it was chosen
                    self._placer.left(call)
                    # A placer that fails immediately must not starve the event loop.
                    await asyncio.sleep(0)
        except TimeoutError as error:
            message = (
                f"step 'wait for an engine' took more than {self._queue.max_wait_s:g} s: {self.states()}"
            )
            raise Unavailable(message, retry_after=jittered(10.0), code="no_engine") from error

    def check_room(self, calls: int, param: str) -> None:
        """Raise BadRequest if one request has more calls than may ever wait, Unavailable if they cannot wait now.

        Call this before any of them begins, because one refused call fails the whole request.
        """
        most = self._queue.max_waiting
        if calls > most:
            message = f"{param}: {calls} replies are more than the {most} that may wait: request fewer ([queue] max_waiting)"
            raise BadRequest(message, code="too_many_replies", param=param)
        if self.waiting + calls > most and not any(slot.state == "open" for slot in self.slots.values()):
            raise _queue_full()

    def release(self, call: Call) -> None:
        """Release the engine that the call had acquired."""
        self._placer.left(call)

    async def _place(self, call: Call) -> Slot:
        """Have the placer choose an engine."""
        request = self._requests[call.call_id] = PlacementRequest(call)
        try:
            self._placer.submit(request)
            return await request.found
        except asyncio.CancelledError:
            if request.found.done() and not request.found.cancelled():
                self._placer.left(call)  # the call may have been given an engine at the same moment
            raise
        finally:
            self._placer.cancel(request)
            self.waiting -= request.waits
            del self._requests[call.call_id]

    def let_wait(self, request: PlacementRequest) -> bool:
        """Let a call wait for an engine; refuse it and return False if too many wait."""
        if self.waiting >= self._queue.max_waiting and not request.call.has_run:
            request.found.set_exception(_queue_full())
            return False
        if not request.waits:
            request.waits = True
            self.waiting += 1
        return True

    def give(self, request: PlacementRequest, engine: str) -> None:
        """Give a call the engine that was chosen for it: immediately, or in turn if it had to wait."""

        def resolve() -> bool:
            if request.found.done():
                return False
            if (slot := self.slots.get(engine)) is not None:
                request.found.set_result(slot)
                return True
            self._placer.left(request.call)
            self._placer.submit(request)
            return False

        if request.waits:
            self.in_turn(resolve)
        else:
            resolve()

    def set_monitor(self, monitor: EngineMonitor) -> None:
        """Set the receiver of reports, which depends on the role of this process."""
        self._monitor = monitor

    def report_unreachable(self, slot: Slot) -> None:
        """Report that a request could not reach an engine, or lost it."""
        self._monitor.unreachable(self.model, slot)

    def report_disputed(self, slot: Slot, reason: str) -> None:
        """Report that an external engine has another version than it should have: it was restarted."""
        self._monitor.disputed(self.model, slot, reason)

    def set_placer(self, placer: Placer | None) -> None:
        """Set the placer; None: choose by the state of this process alone."""
        before, self._placer = self._placer, placer or SlotPlacer(self)
        self._placer.changed()
        for request in before.retire():
            if not request.found.done():
                self._placer.submit(request)

    async def wait_until(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until a condition on the slots holds, or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            return

    def hold(self, reason: str) -> None:
        """Hold every open engine, because there is no coordinator: none gets a new run."""
        for slot in self.slots.values():
            if slot.state == "open":
                slot.hold(reason)

    def notify(self) -> None:
        """Place waiting calls again, a few at a time, after slots have changed."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._placer.changed()

    def on_state_change(self) -> None:
        """Notify the placer of a slot's new state, without waking tasks that wait in `wait_until`."""
        self._placer.changed()

    async def wait_for_turn(self) -> None:
        """Wait behind the calls that engines gave back before this one."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wake_in_turn(woken)
        await woken

    def in_turn(self, wake: Callable[[], bool]) -> None:
        """Call `wake` in order of arrival, a few at each turn of the event loop. It returns whether it woke a call."""
        self._turns.append(wake)
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake_in_turn(self, woken: asyncio.Future[None]) -> None:
        def wake() -> bool:
            if woken.done():
                return False
            woken.set_result(None)
            return True

        self.in_turn(wake)

    def _wake(self) -> None:
        woken, self._waking = 0, bool(self._turns)
        while self._turns and woken < _WOKEN_PER_TURN:
            woken += self._turns.popleft()()
        self._waking = bool(self._turns)
        if self._waking:
            asyncio.get_running_loop().call_soon(self._wake)

    def remember(self, call: Call, slot: Slot) -> None:
        """Record that the engine has the call's tokens cached."""
        self._cached[call.episode_id] = _Cached(slot.name, slot.generation, call.length)
        self._cached.move_to_end(call.episode_id)
        if len(self._cached) > _REMEMBERED:
            self._cached.popitem(last=False)

    def cached(self, call: Call) -> tuple[str, int]:
        """Return the engine that has most of the call's tokens cached, and their number; ("", 0) if none has any."""
        known = self._cached.get(call.episode_id)
        slot = self.slots.get(known.slot) if known is not None else None
        if known is None or slot is None or known.generation != slot.generation:
            return "", 0
        return known.slot, min(known.tokens, call.length)

    async def move(self, call_id: str, engine: str | None) -> None:
        """Send a running or waiting call to another engine. Raise NotFound, or Conflict if it cannot move."""
        call = self.calls.get(call_id)
        if call is None:
            raise NotFound(f"no call {call_id!r} runs or waits", code="no_call")
        target = self.slots.get(engine) if engine is not None else None
        if engine is not None and (target is None or target.state != "open"):
            raise Conflict(f"engine {engine!r} is not open: {self.states()}", code="engine_not_open")
        run = self.run_of(call)
        if run is not None:
            await self._move_running(run, engine)
            return
        call.redirect(engine or "")
        self._place_again(call_id)
        self.notify()

    def _place_again(self, call_id: str) -> None:
        if (request := self._requests.get(call_id)) is not None and not request.found.done():
            self._placer.cancel(request)
            self._placer.submit(request)

    # Trials of versions

    def begin_trial(self, trial: Trial) -> None:
        """Have a share of the conversations that are opened from now on try a version."""
        self.trial = trial

    def end_trial(self, *, promoted: bool) -> None:
        """End the trial; calls of a version that was not promoted continue under the live one."""
        trial, self.trial = self.trial, None
        if trial is None or promoted:
            return
        for call in self.calls.values():
            if call.min_version == trial.version:
                call.accept_version(trial.live)
                self._place_again(call.call_id)
        self.notify()

    @staticmethod
    async def _move_running(run: Run, engine: str | None) -> None:
        if run.pinned:
            message = f"a call with {run.call.pinned} cannot leave its engine: its sampler has a state"
            raise Conflict(message, code="call_pinned")
        if engine == run.slot.name:
            return
        run.call.redirect(engine or "", leaving=run.slot.name)
        # Without an engine the slot is being stopped, and the call leaves it anyway.
        if run.slot.engine is not None:
            await run.slot.engine.abort([run.request_id])

    @contextmanager
    def registered(self, call: Call) -> Iterator[None]:
        """List the call among those that run or wait."""
        self.calls[call.call_id] = call
        try:
            yield
        finally:
            self.calls.pop(call.call_id, None)

    def counts(self) -> CallCounts:
        """Count this process's calls, for the other processes."""
        waiting = (r.call for r in self._requests.values() if r.waits and not r.found.done())
        return count_calls(waiting, self.slots.values())

    def run_of(self, call: Call) -> Run | None:
        """Return the call's run; None while it is in no engine."""
        slot = self.slots.get(call.engine)
        return slot.runs.get(call.request_id) if slot is not None else None

    def silent(self, stall_s: float) -> list[Slot]:
        """Cut stalled runs; return the open engines that have sent no token for `stall_s`.

        A run without a first token may still be queued in the engine, so it is cut only if the whole engine is silent.
        """
        now = asyncio.get_running_loop().time()
        dead = []
        for slot in self.slots.values():
            if slot.state != "open" or not slot.runs:
                continue
            if now - slot.last_token_at > stall_s:
                dead.append(slot)
                continue
            others = any(other.state == "open" for other in self.slots.values() if other is not slot)
            for run in list(slot.runs.values()):
                stalled = run.last_token_at > run.began and now - run.last_token_at > stall_s
                if stalled and others:
                    run.call.avoid_engine(slot.name)
                    run.cut(f"no token for {stall_s:g} s ([engine] stall_s)")
        return dead

    @property
    def ready(self) -> bool:
        """True if an engine is open, or can be opened without a start."""
        return any(slot.state in ("open", "held", "asleep") for slot in self.slots.values())

    def states(self) -> str:
        """Return every engine's state in words, for error messages."""
        found = [f"{s.name} is {s.state} {s.reason}".strip() for s in self.slots.values()]
        return ", ".join(found) or f"model {self.model!r} has no engine"

    def describe(self) -> list[EngineDescription]:
        """Describe every engine for the admin API."""
        return [slot.describe(self.model) for slot in self.slots.values()]

    def describe_calls(self) -> list[CallDescription]:
        """Describe every call that runs or waits for the admin API."""
        return [
            {
                "call_id": call.call_id,
                "episode_id": call.episode_id,
                "model": self.model,
                "engine": call.engine or None,
                "tokens": len(call.turn.ids),
                "pinned": bool(call.pinned),
            }
            for call in self.calls.values()
        ]


def _queue_full() -> Unavailable:
    message = "too many calls wait for an engine ([queue] max_waiting)"
    return Unavailable(message, retry_after=jittered(5.0), code="queue_full")
