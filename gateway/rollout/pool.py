"""A model's engines as the data plane sees them: who may use which, and who waits.

Owns the slots and the calls that run or wait. The pool holds waiting calls itself: nothing is ever queued in an engine that is
paused. Which engine a call goes to is the placer's choice (`placing.py`); in which state an engine is, the control program's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.errors import BadRequest, Conflict, NotFound, Unavailable, jittered
from gateway.rollout.pace import Pace
from gateway.rollout.placing import PlacementRequest, Placer, SlotPlacer
from gateway.rollout.slot import Slot
from gateway.sections import QueueSettings

if TYPE_CHECKING:
    from gateway.rollout.call import Call

log = logging.getLogger(__name__)

_REMEMBERED = 10_000
_WOKEN_AT_ONCE = 4
"""Hundreds of calls that go on at the same moment would keep those that are running from being read."""


@dataclass(frozen=True, slots=True)
class _Cached:
    """The engine of an episode's last turn."""

    slot: str
    generation: int
    tokens: int


class EnginePool:
    """Hands out open engines, and lets calls wait while none is."""

    def __init__(self, model: str, queue: QueueSettings, patience_s: float, pace: Pace | None = None) -> None:
        """`pace` is shared by all pools of a process."""
        self.model = model
        self.pace = pace or Pace()
        self.patience_s = patience_s
        """The time that calls which an engine gave back wait for it."""
        self.slots: dict[str, Slot] = {}
        self.calls: dict[str, Call] = {}
        """Calls that run in an engine or wait for one."""
        self.waiting = 0
        self.on_trouble: Callable[[Slot], None] = lambda _slot: None
        """Called when a request could not reach an engine, or lost it."""
        self.on_dispute: Callable[[Slot, str], None] = lambda _slot, _reason: None
        """Called when an engine that others start says that it runs another version than it should: it was started anew."""
        self._queue = queue
        self._placer: Placer = SlotPlacer(self)
        self._seeking: dict[str, PlacementRequest] = {}
        self._changed = asyncio.Event()
        self._patients: deque[asyncio.Future[None]] = deque()
        """Calls that wait for their own engine."""
        self._turns: deque[Callable[[], bool]] = deque()
        """Callbacks that wake waiting calls, a few at each turn of the event loop; each returns True if it woke one."""
        self._waking = False
        self._cached: OrderedDict[str, _Cached] = OrderedDict()

    async def acquire(self, call: Call) -> Slot:
        """An open engine for a call, of a version that may sample it; waits for one. `release` is owed for it.

        Raises Unavailable when too many wait already (unless the call has begun), or the wait was too long.
        """
        try:
            async with asyncio.timeout(self._queue.max_wait_s):
                while True:
                    if call.patient_until:
                        await self._own(call)
                    slot = await self._seek(call)
                    if slot.state == "open" and slot.version >= call.version:
                        return slot
                    self._placer.changed()  # the placer may have changed while the call was on its way
                    self._placer.left(call)
                    # A placer that fails at once must not starve the event loop.
                    await asyncio.sleep(0)
        except TimeoutError as error:
            message = (
                f"step 'wait for an engine' took more than {self._queue.max_wait_s:g} s: {self.states()}"
            )
            raise Unavailable(message, retry_after=jittered(10.0), code="no_engine") from error

    def check_room(self, calls: int, param: str) -> None:
        """Raises BadRequest if so many calls of one request can never wait here, Unavailable if they cannot now.

        So none of them is begun that the others would take down with them.
        """
        most = self._queue.max_waiting
        if calls > most:
            message = f"{param}: {calls} replies are more than the {most} that may wait: ask for fewer ([queue] max_waiting)"
            raise BadRequest(message, code="too_many_replies", param=param)
        if self.waiting + calls > most and not any(slot.state == "open" for slot in self.slots.values()):
            raise _queue_full()

    def release(self, call: Call) -> None:
        """The call is not in the engine any more that it acquired."""
        self._placer.left(call)

    async def _seek(self, call: Call) -> Slot:
        seeker = self._seeking[call.call_id] = PlacementRequest(call)
        try:
            self._placer.submit(seeker)
            return await seeker.found
        except asyncio.CancelledError:
            if seeker.found.done() and not seeker.found.cancelled():
                self._placer.left(call)  # the call may have been given an engine at the same moment
            raise
        finally:
            self._placer.cancel(seeker)
            self.waiting -= seeker.waits
            del self._seeking[call.call_id]

    def let_wait(self, seeker: PlacementRequest) -> bool:
        """There is no engine for a call yet. False: too many wait, and it is refused."""
        if self.waiting >= self._queue.max_waiting and not seeker.call.begun:
            seeker.found.set_exception(_queue_full())
            return False
        if not seeker.waits:
            seeker.waits = True
            self.waiting += 1
        return True

    def give(self, seeker: PlacementRequest, engine: str) -> None:
        """An engine was chosen for a call, which goes on when its turn comes."""

        def go_on() -> bool:
            if seeker.found.done():
                return False
            if (slot := self.slots.get(engine)) is not None:
                seeker.found.set_result(slot)
                return True
            self._placer.left(seeker.call)
            self._placer.submit(seeker)
            return False

        self.in_turn(go_on)

    def set_placer(self, placer: Placer | None) -> None:
        """Sets what chooses engines; None for this process by itself."""
        before, self._placer = self._placer, placer or SlotPlacer(self)
        self._placer.changed()
        for seeker in before.retire():
            if not seeker.found.done():
                self._placer.submit(seeker)

    async def _own(self, call: Call) -> None:
        """Waits until the call has waited long enough for its own engine, or need not."""
        loop = asyncio.get_running_loop()
        self.waiting += 1
        try:
            while self._patient(call):
                woken: asyncio.Future[None] = loop.create_future()
                self._patients.append(woken)
                try:
                    async with asyncio.timeout_at(call.patient_until):
                        await woken
                except TimeoutError:
                    return
        finally:
            self.waiting -= 1

    async def until(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits until something holds of the slots, or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            return

    def hold(self, reason: str) -> None:
        """No engine gets a new run: nobody says any more what may be done."""
        for slot in self.slots.values():
            if slot.state == "open":
                slot.state, slot.reason = "held", reason

    def notify(self) -> None:
        """Slots have changed: calls that wait look again, a few at a time."""
        self._changed.set()
        self._changed = asyncio.Event()
        patients, self._patients = self._patients, deque()
        for woken in patients:
            self._wake_in_turn(woken)
        self._placer.changed()

    def shown(self) -> None:
        """A slot may not get calls any more, or says something else of itself."""
        self._placer.changed()

    async def turn(self) -> None:
        """Lets a call that was given back go on, behind those that were given back before it."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wake_in_turn(woken)
        await woken

    def in_turn(self, wake: Callable[[], bool]) -> None:
        """Does what wakes a call, a few at each turn of the event loop. `wake` answers whether it woke one."""
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
        while self._turns and woken < _WOKEN_AT_ONCE:
            woken += self._turns.popleft()()
        self._waking = bool(self._turns)
        if self._waking:
            asyncio.get_running_loop().call_soon(self._wake)

    def remember(self, call: Call, slot: Slot) -> None:
        """The engine now has the call's tokens cached."""
        self._cached[call.episode_id] = _Cached(slot.name, slot.generation, call.length)
        self._cached.move_to_end(call.episode_id)
        if len(self._cached) > _REMEMBERED:
            self._cached.popitem(last=False)

    def _patient(self, call: Call) -> bool:
        """True if the call still waits for its own engine: for a short time, and only while no other engine has less
        than its share of work."""
        own = self.slots.get(call.target)
        if own is None or own.state != "held" or call.patient_until <= asyncio.get_running_loop().time():
            return False
        share = len(self.calls) / max(len(self.slots), 1)
        return all(slot.streams >= share for slot in self.slots.values() if slot.state == "open")

    def cached(self, call: Call) -> tuple[str, int]:
        """The engine that is believed to have tokens of the call cached, and how many; empty: none."""
        known = self._cached.get(call.episode_id)
        slot = self.slots.get(known.slot) if known is not None else None
        if known is None or slot is None or known.generation != slot.generation:
            return "", 0
        return known.slot, min(known.tokens, call.length)

    async def move(self, call_id: str, engine: str | None) -> None:
        """Sends a running or waiting call to another engine. Raises NotFound, or Conflict if it cannot move."""
        call = self.calls.get(call_id)
        if call is None:
            raise NotFound(f"no call {call_id!r} runs or waits", code="no_call")
        target = self.slots.get(engine) if engine is not None else None
        if engine is not None and (target is None or target.state != "open"):
            raise Conflict(f"engine {engine!r} is not open: {self.states()}", code="engine_not_open")
        run = call.run
        if run is None:
            call.target, call.patient_until = engine or "", 0.0
            if (seeker := self._seeking.get(call_id)) is not None and not seeker.found.done():
                self._placer.cancel(seeker)
                self._placer.submit(seeker)
            self.notify()
            return
        if run.pinned:
            raise Conflict(
                f"a call with {run.call.sampling.pinned} cannot leave its engine: its sampler has a state",
                code="call_pinned",
            )
        if engine == run.slot.name:
            return
        call.target, call.avoid = engine or "", {run.slot.name}
        # Otherwise the engine is being stopped, and the call leaves it anyway
        if run.slot.engine is not None:
            await run.slot.engine.abort([run.request_id])

    def silent(self, stall_s: float) -> list[Slot]:
        """Cuts runs that have stalled, and answers open engines that say nothing at all any more.

        A run that has had no token yet may wait inside the engine while others run, so only a silent engine ends it.
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
                    run.call.avoid = {slot.name}
                    run.cut(f"no token for {stall_s:g} s ([engine] stall_s)")
        return dead

    @property
    def ready(self) -> bool:
        """True if an engine is open, or will be in a moment."""
        return any(slot.state in ("open", "held", "asleep") for slot in self.slots.values())

    def states(self) -> str:
        """Every engine's state, for people."""
        found = [f"{s.name} is {s.state} {s.reason}".strip() for s in self.slots.values()]
        return ", ".join(found) or f"model {self.model!r} has no engine"

    def describe(self) -> list[dict[str, Any]]:
        """Every engine, for the admin API."""
        return [slot.describe(self.model) for slot in self.slots.values()]

    def describe_calls(self) -> list[dict[str, Any]]:
        """Every call that runs or waits, for the admin API."""
        return [
            {
                "call_id": call.call_id,
                "episode_id": call.episode_id,
                "model": self.model,
                "engine": call.run.slot.name if call.run else None,
                "tokens": len(call.turn.ids),
                "pinned": bool(call.sampling.pinned),
            }
            for call in self.calls.values()
        ]


def _queue_full() -> Unavailable:
    message = "too many calls wait for an engine ([queue] max_waiting)"
    return Unavailable(message, retry_after=jittered(5.0), code="queue_full")
