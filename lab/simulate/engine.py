"""An inference engine in closed form: events are admissions and ends of calls, never tokens.

A decode step of n calls with kv tokens in the cache takes k1 * kv + max(k2, k3 * n) + k4 seconds (StaleFlow, arXiv 2601.12784;
`scheduler.policies.throughput`) and gives each running call one token. While the same calls run, kv grows by n a step, so s
steps take

    span(s) = s * (max(k2, k3 * n) + k4) + k1 * (s * kv + n * s * (s - 1) / 2),

and the step that is underway at any moment is the root of a quadratic. Owns its calls and its own clock, `at`: the boundary of
steps that is the present or the next one. Invariants:
- every change of the engine takes effect at a boundary: a step that has begun ends, as in vLLM;
- the cache never holds more than `capacity` tokens after a step, unless one call alone needs more;
- a call that is admitted has its missing tokens prefilled first, and the others wait for that;
- a call is admitted if all running ones could then sample `HEADROOM` tokens each; alone in an engine it is always admitted;
- when the next step would not fit, the call that was admitted last goes back to the head of the queue, its cache lost (vLLM's
  preemption by recomputation).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from scheduler.policies.throughput import EngineModel

HEADROOM = 256
"""Steps that must fit into the cache for a call to be admitted. Without it a preempted call would return immediately, for a step.
(vLLM leaves a hundredth of its blocks free, SGLang a share of what running calls may still sample.)"""


def span_s(model: EngineModel, steps: int, n: int, kv: int) -> float:
    """Return the seconds of `steps` steps of n calls that begin with kv tokens in the cache."""
    flat = max(model.s_per_batch, model.s_per_call * n) + model.s_per_step
    return steps * flat + model.s_per_kv_token * (steps * kv + n * steps * (steps - 1) / 2)


@dataclass(slots=True, eq=False)
class Call:
    """One request for tokens; `done` of `want` are sampled, not counting those of the present stay in an engine."""

    owner: Any
    prompt: int
    want: int
    done: int = 0
    cached: int = 0
    """Tokens of prompt and done that the engine has in its cache already, when it is added."""
    start: int = -1
    """The engine's count of steps when it was admitted; -1: it waits."""

    @property
    def context(self) -> int:
        """Tokens of its prompt and of what was sampled before its present stay."""
        return self.prompt + self.done


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The capacity of an engine, and the time of its steps."""

    model: EngineModel
    prefill_s: float
    """Seconds for each token of a prompt."""
    capacity: int
    """Tokens in the cache."""
    slots: int
    """The most calls that run concurrently."""


class Engine:
    """The calls of one engine."""

    def __init__(self, costs: EngineCosts) -> None:
        self.costs = costs
        self.at = 0.0
        self.steps = 0
        self.kv = 0
        self.prefilled = 0
        """Tokens that were ever prefilled."""
        self.waiting: deque[Call] = deque()
        self._running: dict[Call, None] = {}
        self._ends: list[tuple[int, int, Call]] = []
        self._serial = 0

    # Contents

    @property
    def running(self) -> int:
        """Calls that sample."""
        return len(self._running)

    @property
    def load(self) -> int:
        """Calls that sample or wait."""
        return len(self._running) + len(self.waiting)

    def calls(self) -> Iterator[Call]:
        """Yield running calls in order of admission, then waiting ones."""
        yield from self._running
        yield from self.waiting

    def sampled(self, call: Call) -> int:
        """Return the sampled tokens of the call, up to the boundary `at`."""
        return call.done + (self.steps - call.start if call.start >= 0 else 0)

    def rate(self) -> float:
        """Return the present tokens a second."""
        return self.costs.model.rate(len(self._running), self.kv)

    # Time

    def advance(self, now: float) -> None:
        """Advance to the first boundary that is not before `now`. No call may end before that: see `next_event`."""
        if now <= self.at:
            return
        if not self._running:
            self.at = now
            return
        self._step(min(self._steps_until(now - self.at), self._until_event()))

    def next_event(self) -> float | None:
        """Return the time at which a call ends or the cache is full, if nothing happens before; None if nothing runs."""
        return self.at + self._span(self._until_event()) if self._running else None

    def settle(self, now: float) -> list[Call]:
        """Run to the event that is due at `now`, and return the calls that end there, with `done` as large as `want`."""
        if self._running and now >= self.at:
            self._step(self._until_event())
        ended = list(self._ended())
        if not ended and self._running and self._full():
            self._preempt()
        else:
            self._fill()
        return ended

    # Calls

    def add(self, now: float, call: Call) -> None:
        """Add a call, which begins as soon as there is room."""
        assert call.want > call.done
        self.advance(now)
        call.start = -1
        self.waiting.append(call)
        self._fill()

    def remove(self, now: float, call: Call) -> None:
        """Remove a call; its `done` has what was sampled up to the boundary."""
        self.advance(now)
        if call.start < 0:
            self.waiting.remove(call)
        else:
            self._leave(call)
        self._fill()

    def drain(self, now: float) -> list[Call]:
        """Remove and return all calls."""
        self.advance(now)
        calls = list(self.calls())
        for call in [*self._running]:
            self._leave(call)
        self.waiting.clear()
        self._ends.clear()
        return calls

    # Internals

    def _step(self, steps: int) -> None:
        self.at += self._span(steps)
        self.steps += steps
        self.kv += steps * len(self._running)

    def _span(self, steps: int) -> float:
        return span_s(self.costs.model, steps, len(self._running), self.kv)

    def _steps_until(self, seconds: float) -> int:
        """Return the least number of steps that take at least `seconds`."""
        model, n = self.costs.model, len(self._running)
        a = model.s_per_kv_token * n / 2
        b = model.step_s(n, self.kv) - a
        # The root of a s^2 + b s - seconds, in the form without cancellation.
        root = 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))
        steps = max(math.ceil(root), 1)
        while steps > 1 and self._span(steps - 1) >= seconds:
            steps -= 1
        while self._span(steps) < seconds:
            steps += 1
        return steps

    def _until_event(self) -> int:
        while self._outdated(self._ends[0]):
            heappop(self._ends)
        return max(0, min(self._ends[0][0] - self.steps, self._room()))

    def _room(self) -> int:
        """Return the number of steps that fit into the cache."""
        n = len(self._running)
        return self._ends[0][0] - self.steps if n == 1 else (self.costs.capacity - self.kv) // n

    def _full(self) -> bool:
        return len(self._running) > 1 and self.kv + len(self._running) > self.costs.capacity

    def _ended(self) -> Iterator[Call]:
        while self._ends and (self._outdated(self._ends[0]) or self._ends[0][0] <= self.steps):
            entry = heappop(self._ends)
            if not self._outdated(entry):
                self._leave(entry[2])
                yield entry[2]

    def _outdated(self, entry: tuple[int, int, Call]) -> bool:
        end, _, call = entry
        return call not in self._running or call.start + call.want - call.done != end

    def _leave(self, call: Call) -> None:
        del self._running[call]
        call.done += self.steps - call.start
        call.start = -1
        self.kv -= call.context

    def _preempt(self) -> None:
        call = next(reversed(self._running))
        self._leave(call)
        call.cached = 0
        self.waiting.appendleft(call)

    def _fill(self) -> None:
        costs = self.costs
        if self._running and not self._until_event():
            return  # what is due at this boundary comes first (`settle`)
        while self.waiting and len(self._running) < costs.slots:
            call, n = self.waiting[0], len(self._running)
            if n and self.kv + call.context + HEADROOM * (n + 1) > costs.capacity:
                return
            self.waiting.popleft()
            uncached = max(call.context - call.cached, 0)
            self.at += uncached * costs.prefill_s
            self.prefilled += uncached
            call.start, call.cached = self.steps, 0
            self.kv += call.context
            self._running[call] = None
            self._serial += 1
            heappush(self._ends, (self.steps + call.want - call.done, self._serial, call))
