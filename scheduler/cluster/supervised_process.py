"""A process, or a few that only make sense together, that is to be there always.

Owns what it has started: cancelling `run` ends all of it in order. One that ends, or says nothing for too long, is started anew,
a little later each time, within a budget of restarts. Ranks live and die together, as torchrun has it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from scheduler.cluster.errors import ClusterError
from scheduler.cluster.launch import Ended, Running

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 10.0
_LOOK_EVERY_S = 0.2

Say = Callable[[str], None]


class GivenUp(ClusterError):
    """The budget of restarts is spent."""


class Budget:
    """At most `restarts` within `window_s`; each waits longer than the one before."""

    def __init__(self, restarts: int, window_s: float) -> None:
        self._restarts = restarts
        self._window_s = window_s
        self._at: deque[float] = deque()

    def delay_s(self, now: float) -> float | None:
        """Returns the seconds to wait before the restart that is due now; None if the budget is used up."""
        while self._at and now - self._at[0] > self._window_s:
            self._at.popleft()
        if len(self._at) >= self._restarts:
            return None
        self._at.append(now)
        return min(_FIRST_DELAY_S * 2.0 ** (len(self._at) - 1), _LONGEST_DELAY_S)


class SupervisedProcess:
    """`run` is all of it; `up` and `running` may be read at any time."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Sequence[Running]]],
        budget: Budget,
        say: Say,
        *,
        healthy: Callable[[Running], Awaitable[bool]] | None = None,
        start_s: float = 60.0,
        silent_s: float = 60.0,
        stop_s: float = 10.0,
        may_end: bool = False,
    ) -> None:
        """`healthy`: whether the first process answers; without it, it is up once it is started. `may_end`: 0 is no failure."""
        self.name = name
        self.running: Sequence[Running] = ()
        self.up = asyncio.Event()
        self.restarts = 0
        self.stop_s = stop_s
        """Seconds that its processes may take to end when they are stopped; it may be changed until then."""
        self._start = start
        self._budget = budget
        self._say = say
        self._healthy = healthy
        self._start_s, self._silent_s = start_s, silent_s
        self._may_end = may_end

    async def run(self) -> None:
        """Runs it again and again until it ends with status 0, if it may. Raises GivenUp."""
        while (reason := await self._life()) is not None:
            delay = self._budget.delay_s(time.monotonic())
            if delay is None:
                raise GivenUp(f"{self.name} is given up after {self.restarts} restarts: {reason}")
            self.restarts += 1
            self._say(f"{self.name} {reason}\n  it is started again in {delay:.1f} s")
            await asyncio.sleep(delay)

    async def _life(self) -> str | None:
        """One life, from its start to whatever ended it, in words; None: it ended as it may."""
        try:
            self.running = await self._start()
            return await self._lived(self.running)
        except (ClusterError, OSError) as error:
            return f"could not be started: {error}"
        finally:
            self.up.clear()
            left, self.running = self.running, ()
            await asyncio.gather(*(running.stop(self.stop_s) for running in left))

    async def _lived(self, running: Sequence[Running]) -> str | None:
        waits = {asyncio.create_task(_end_of(one), name=f"wait-{one.name}") for one in running}
        watch = asyncio.create_task(self._watch(running[0]), name=f"watch-{self.name}")
        left = set(waits)
        try:
            while left:
                await asyncio.wait({*left, watch}, return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    return watch.result()
                for done in [wait for wait in left if wait.done()]:
                    left.remove(done)
                    name, ended = done.result()
                    if ended.status or not self._may_end:
                        said = f":\n{ended.said}" if ended.said else ""
                        which = "" if len(waits) == 1 else f" ({name})"
                        return f"ended with {ended.status}{which}{said}"
            return None
        finally:
            for task in (*waits, watch):
                task.cancel()
            await asyncio.gather(*waits, watch, return_exceptions=True)

    async def _watch(self, first: Running) -> str:
        """Sees when it is up, and that it goes on answering; ends with what is wrong."""
        answered, began = False, time.monotonic()
        while True:
            if self._healthy is None or await self._healthy(first):
                answered, began = True, time.monotonic()
                self.up.set()
            limit = self._silent_s if answered else self._start_s
            if time.monotonic() - began > limit:
                return f"has not answered for {limit:g} s" + ("" if answered else " since its start")
            await asyncio.sleep(_LOOK_EVERY_S if not answered else 1.0)


async def _end_of(running: Running) -> tuple[str, Ended]:
    return running.name, await running.wait()
