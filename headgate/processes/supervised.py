"""Supervises a process, or several that only work together: restarts them whenever they end.

Owns what it has started: cancelling `run` ends all of it in order. A process that ends, or is silent for too long, is restarted
after a pause that a restart policy decides. Ranks live and die together, as with torchrun.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from headgate.processes.child import LocalProcess
from headgate.processes.errors import GivenUp, ProcessError
from headgate.processes.slow import SILENT_S

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 10.0
_LONG_LIFE_S = 30.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The end of a process."""

    status: int
    output: str
    """Its last lines, or what became of its node."""


class Running(Protocol):
    """A process that was started."""

    name: str

    async def wait(self) -> ProcessEnded:
        """Wait until the process ends, or its machine is lost."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End it and whatever it started; what is left after `grace_s` is killed."""
        ...


R = TypeVar("R", bound=Running)


class Child:
    """A child process of this one, as a `Running`."""

    def __init__(self, process: LocalProcess) -> None:
        self.name = process.name
        self._process = process

    async def wait(self) -> ProcessEnded:
        return ProcessEnded(await self._process.wait(), self._process.tail())

    async def stop(self, grace_s: float) -> None:
        await self._process.stop(grace_s)


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a process, from its start to whatever ended it."""

    reason: str
    """The reason why it ended, in words."""
    status: int | None
    """The exit status; None where it never began, or was ended because it did not respond."""
    started: bool
    ended_at: float
    lived_s: float
    replaced: bool = False
    """The life was ended to start a new one (`SupervisedProcess.replace`)."""


class Restarts(Protocol):
    """A policy of restarts."""

    def after(self, life: Life) -> float | None:
        """Return the seconds to wait before the next start; None for no other start. Raise GivenUp with words of its own."""
        ...


REFUSED = 2
"""The exit status of a program that would fail again: a wrong command line or settings file, or a refusal that lasts."""


class Budget:
    """At most `restarts` within `window_s`; each waits longer than the one before. None after the status `REFUSED`."""

    def __init__(self, restarts: int, window_s: float) -> None:
        self._restarts = restarts
        self._window_s = window_s
        self._at: deque[float] = deque()

    def after(self, life: Life) -> float | None:
        """Return the pause after a life; None if the budget is used up."""
        while self._at and life.ended_at - self._at[0] > self._window_s:
            self._at.popleft()
        if life.status == REFUSED or len(self._at) >= self._restarts:
            return None
        self._at.append(life.ended_at)
        return min(_FIRST_DELAY_S * 2.0 ** (len(self._at) - 1), _LONGEST_DELAY_S)


class Backoff:
    """Unlimited restarts. Each pause is longer than the one before, until a process has run for long."""

    def __init__(self) -> None:
        self._delay_s = 0.0

    def after(self, life: Life) -> float | None:
        """Return the pause after a life."""
        before = 0.0 if life.lived_s >= _LONG_LIFE_S else self._delay_s
        self._delay_s = min(max(2 * before, _FIRST_DELAY_S), _LONGEST_DELAY_S)
        return self._delay_s


class SupervisedProcess(Generic[R]):
    """`run` is all of it; `up` and `running` may be read at any time."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Sequence[R]]],
        restarts: Restarts,
        report: Report,
        *,
        healthy: Callable[[R], Awaitable[bool]] | None = None,
        start_s: float = 60.0,
        silent_s: float = 60.0,
        stop_s: float = 10.0,
        silent_stop_s: float | None = None,
        look_s: tuple[float, float] = (0.2, 1.0),
        may_end: bool = False,
    ) -> None:
        """`healthy`: returns whether the first process responds; without it, a process is up once it is started. `look_s`: the
        seconds between two such questions, before the first response and after. `silent_stop_s`: the `stop_s` of a process that
        does not respond. `may_end`: a status of 0 is not a failure.
        """
        self.name = name
        self.running: Sequence[R] = ()
        self.up = asyncio.Event()
        self.restarts = 0
        self.stop_s = stop_s
        """Seconds that its processes may take to end when they are stopped; it may be changed until then."""
        self._start = start
        self._restarts = restarts
        self._report = report
        self._healthy = healthy
        self._start_s, self._silent_s, self._silent_stop_s = start_s, silent_s, silent_stop_s
        self._look_s = look_s
        self._may_end = may_end
        self._replaced = asyncio.Event()
        """The request to restart it."""

    async def run(self) -> None:
        """Run it again and again until it ends with status 0, if it may. Raise GivenUp."""
        while (life := await self._life()) is not None:
            if life.replaced:
                continue
            delay = self._restarts.after(life)
            if delay is None:
                raise GivenUp(f"{self.name} is given up after {self.restarts} restarts: {life.reason}")
            self.restarts += 1
            self._report(f"{self.name} {life.reason}\n  it is started again in {delay:.1f} s")
            await asyncio.sleep(delay)

    def replace(self) -> None:
        """Restart it immediately, which does not count as a restart."""
        self._replaced.set()

    async def _life(self) -> Life | None:
        """Run the process once. Return the life, or None if it ended as it may."""
        began, grace_s = time.monotonic(), None
        self._replaced.clear()
        try:
            self.running = await self._start()
            ended = await self._lived(self.running)
            if ended is None:
                return None
            reason, status = ended
            grace_s = self._silent_stop_s if status is None else None
        except (ProcessError, OSError) as error:
            reason, status = f"could not be started: {error}", None
        finally:
            self.up.clear()
            started = bool(self.running)
            left, self.running = self.running, ()
            await asyncio.gather(*(one.stop(self.stop_s if grace_s is None else grace_s) for one in left))
        now = time.monotonic()
        return Life(reason, status, started, now, now - began, started and self._replaced.is_set())

    async def _lived(self, running: Sequence[R]) -> tuple[str, int | None] | None:
        """Return the reason why the processes must be replaced, and the status of the one that ended; None: all ended as they
        may."""
        waits = {asyncio.create_task(_end_of(one), name=f"wait-{one.name}") for one in running}
        watch = asyncio.create_task(self._watch(running[0]), name=f"watch-{self.name}")
        replaced = asyncio.create_task(self._replaced.wait(), name=f"replace-{self.name}")
        left = set(waits)
        try:
            while left:
                await asyncio.wait({*left, watch, replaced}, return_when=asyncio.FIRST_COMPLETED)
                if replaced.done():
                    return "is replaced", None
                for done in [wait for wait in left if wait.done()]:
                    left.remove(done)
                    name, ended = done.result()
                    if ended.status or not self._may_end:
                        output = f":\n{ended.output}" if ended.output else ""
                        which = "" if len(waits) == 1 else f" ({name})"
                        return f"ended with {ended.status}{which}{output}", ended.status
                if watch.done():
                    return watch.result(), None
            return None
        finally:
            for task in (*waits, watch, replaced):
                task.cancel()
            await asyncio.gather(*waits, watch, replaced, return_exceptions=True)

    async def _watch(self, first: R) -> str:
        """Set `up` at the first response, and return what is wrong once the process stops responding."""
        responded, last = False, time.monotonic()
        output = False
        while True:
            limit = self._silent_s if responded else self._start_s
            if self._healthy is None or await self._healthy(first):
                responded, last = True, time.monotonic()
                self.up.set()
            elif time.monotonic() - last > limit:
                return f"has not responded for {limit:g} s" + ("" if responded else " since its start")
            elif not (responded or output) and time.monotonic() - last >= SILENT_S:
                output = True
                self._report(f"waiting for {self.name} to respond, for up to {limit:g} s")
            await asyncio.sleep(self._look_s[responded])


async def _end_of(running: Running) -> tuple[str, ProcessEnded]:
    return running.name, await running.wait()
