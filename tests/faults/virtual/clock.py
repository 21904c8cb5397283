"""An event loop whose time is the test's: nothing waits, and what is ready runs in the order in which it became so."""

from __future__ import annotations

import asyncio
import os
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings

T = TypeVar("T")
_LEAST_S = 1e-6


def profile(examples: int, steps: int = 50) -> settings:
    """Return settings for `examples` runs of at most `steps` steps, times `HEADGATE_MACHINES`."""
    times = int(os.environ.get("HEADGATE_MACHINES", "1"))
    unhealthy = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    if "HEADGATE_SHRINK" in os.environ:  # it can take minutes
        phases.append(Phase.shrink)
    return settings(
        phases=phases,
        max_examples=examples * times,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=unhealthy,
    )


class Clock:
    """Seconds, the same for every holder. Stands in for the module `time` too."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def time(self) -> float:
        """Stands in for `time.time`."""
        return self.now

    def monotonic(self) -> float:
        """Stands in for `time.monotonic`."""
        return self.now


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Never waits: it stops the loop instead, and records how long the loop would have waited."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        found: list[Any] = super().select(0)
        if not found and timeout != 0:
            self.loop.idle_for = timeout
            self.loop.stop()
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """One process's event loop, or that of all."""

    def __init__(self, clock: Clock) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self
        self.clock = clock
        self.idle_for: float | None = None
        """After `settle`: when the next timer is due; None: none is set."""
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.failures.append(context))

    def time(self) -> float:
        return self.clock.now

    def settle(self) -> None:
        """Run until no callback is ready."""
        self.run_forever()

    def advance(self, seconds: float) -> None:
        """Advance time, timer by timer."""
        until = self.clock.now + seconds
        self.settle()
        while self.idle_for is not None and self.clock.now + self.idle_for <= until:
            self.clock.now += max(self.idle_for, _LEAST_S)
            self.settle()
        self.clock.now = max(until, self.clock.now)
        self.settle()

    def run(self, work: Coroutine[Any, Any, T], limit_s: float = 0.0) -> T:
        """Run `work` to its end, which must come within `limit_s` virtual seconds."""
        task = self.create_task(work)
        self.settle()
        until = self.clock.now + limit_s
        while not task.done() and self.idle_for is not None and self.clock.now + self.idle_for <= until:
            self.clock.now += max(self.idle_for, _LEAST_S)
            self.settle()
        assert task.done(), f"{task} did not end within {limit_s:g} s"
        return task.result()

    def end(self) -> None:
        """Cancel what is left and close the loop."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.settle()
        self.close()
