"""A model's engines as the data plane sees them: who may use which, and who waits.

Owns the slots and the calls that run or wait. The pool holds waiting calls itself: nothing is ever queued in an engine that is
paused. `scheduler.policies.routing` decides which engine a call goes to; the control program, in which state an engine is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.errors import Conflict, NotFound, Unavailable, jittered
from gateway.rollout.pace import Pace
from gateway.rollout.slot import Run, Slot
from gateway.sections import QueueSettings
from scheduler.policies.routing import EngineLoad, choose

if TYPE_CHECKING:
    from gateway.rollout.call import Call

log = logging.getLogger(__name__)

_REMEMBERED = 10_000
_WOKEN_AT_ONCE = 4
"""Hundreds of calls that go on at the same moment would keep those that are running from being read."""


@dataclass(frozen=True, slots=True)
class _Cached:
    """Where an episode's last turn ran."""

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
        """How long calls that an engine gave back wait for it."""
        self.slots: dict[str, Slot] = {}
        self.calls: dict[str, Call] = {}
        """Calls that run in an engine or wait for one."""
        self.waiting = 0
        self.on_trouble: Callable[[Slot], None] = lambda _slot: None
        """Called when a request could not reach an engine, or lost it."""
        self.on_dispute: Callable[[Slot, str], None] = lambda _slot, _reason: None
        """Called when an engine that others start says that it runs another version than it should: it was started anew."""
        self._queue = queue
        self._changed = asyncio.Event()
        self._waiters: deque[asyncio.Future[None]] = deque()
        """Calls that wait, first come, first served."""
        self._turns: deque[asyncio.Future[None]] = deque()
        """Calls that may look for an engine, a few at each turn of the event loop."""
        self._cached: OrderedDict[str, _Cached] = OrderedDict()

    async def acquire(self, call: Call) -> Slot:
        """An open engine for a call; waits for one.

        Raises Unavailable when too many wait already (unless the call has begun), or the wait was too long.
        """
        if slot := self._choose(call):
            return slot
        if self.waiting >= self._queue.max_waiting and not call.begun:
            raise Unavailable(
                "too many calls wait for an engine ([queue] max_waiting)",
                retry_after=jittered(5.0),
                code="queue_full",
            )
        self.waiting += 1
        try:
            async with asyncio.timeout(self._queue.max_wait_s):
                while (slot := self._choose(call)) is None:
                    await self._wait(call)
                return slot
        except TimeoutError as error:
            message = (
                f"step 'wait for an engine' took more than {self._queue.max_wait_s:g} s: {self.states()}"
            )
            raise Unavailable(message, retry_after=jittered(10.0), code="no_engine") from error
        finally:
            self.waiting -= 1

    async def _wait(self, call: Call) -> None:
        """Until slots change, or the call has waited long enough for its own."""
        loop = asyncio.get_running_loop()
        left, woken = call.patient_until - loop.time(), loop.create_future()
        self._waiters.append(woken)
        try:
            async with asyncio.timeout(left if left > 0 else None):
                await woken
        except TimeoutError:
            return

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
        self._take_turns(self._waiters)
        self._waiters = deque()

    async def turn(self) -> None:
        """Lets a call that was given back go on, behind those that were given back before it."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take_turns([woken])
        await woken

    def _take_turns(self, waiters: Iterable[asyncio.Future[None]]) -> None:
        idle = not self._turns
        self._turns.extend(waiters)
        if idle and self._turns:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        woken = 0
        while self._turns and woken < _WOKEN_AT_ONCE:
            if not (waiter := self._turns.popleft()).done():
                waiter.set_result(None)
                woken += 1
        if self._turns:
            asyncio.get_running_loop().call_soon(self._wake)

    def remember(self, call: Call, slot: Slot) -> None:
        """The engine now has the call's tokens cached."""
        self._cached[call.episode_id] = _Cached(slot.name, slot.generation, call.length)
        self._cached.move_to_end(call.episode_id)
        if len(self._cached) > _REMEMBERED:
            self._cached.popitem(last=False)

    def _choose(self, call: Call) -> Slot | None:
        target = self.slots.get(call.target)
        if target is not None and target.state == "open":
            return target
        if target is not None and target.state == "held" and self._patient(call):
            return None
        loads = [
            EngineLoad(slot.name, slot.streams, self._cached_tokens(call, slot))
            for slot in self.slots.values()
            if slot.state == "open"
        ]
        name = choose(loads, frozenset(call.avoid))
        return self.slots[name] if name is not None else None

    def _patient(self, call: Call) -> bool:
        """Whether the call still waits for its own engine: not for long, and not while another has less than its share to do."""
        if call.patient_until <= asyncio.get_running_loop().time():
            return False
        share = len(self.calls) / max(len(self.slots), 1)
        return all(slot.streams >= share for slot in self.slots.values() if slot.state == "open")

    def _cached_tokens(self, call: Call, slot: Slot) -> int:
        known = self._cached.get(call.episode_id)
        if known is None or (known.slot, known.generation) != (slot.name, slot.generation):
            return 0
        return min(known.tokens, call.length)

    async def move(self, call_id: str, engine: str | None) -> None:
        """Sends a running or waiting call to another engine. Raises NotFound, or Conflict if it cannot move."""
        call = self.calls.get(call_id)
        if call is None:
            raise NotFound(f"no call {call_id!r} runs or waits", code="no_call")
        target = self.slots.get(engine) if engine is not None else None
        if engine is not None and (target is None or target.state != "open"):
            raise Conflict(f"engine {engine!r} is not open: {self.states()}", code="engine_not_open")
        found = self.run_of(call_id)
        if found is None:
            call.target = engine or ""
            self.notify()
            return
        slot, run = found
        if run.pinned:
            raise Conflict(
                f"a call with {run.call.sampling.pinned} cannot leave its engine: its sampler has a state",
                code="call_pinned",
            )
        if engine == slot.name:
            return
        call.target, call.avoid = engine or "", {slot.name}
        assert slot.engine is not None
        await slot.engine.abort([run.request_id])

    def run_of(self, call_id: str) -> tuple[Slot, Run] | None:
        """Where a call runs."""
        for slot in self.slots.values():
            for run in slot.runs.values():
                if run.call.call_id == call_id:
                    return slot, run
        return None

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
        """Whether an engine is open, or will be in a moment."""
        return any(slot.state in ("open", "held") for slot in self.slots.values())

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
                "engine": found[0].name if (found := self.run_of(call.call_id)) else None,
                "tokens": len(call.turn.ids),
                "pinned": bool(call.sampling.pinned),
            }
            for call in self.calls.values()
        ]
