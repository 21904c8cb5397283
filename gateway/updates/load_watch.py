"""Distinguishes a load of weights that is slow from one that is stuck, by the bytes that the engine's processes read.

Invariants: a load that reads is never ended here, and what it waits for is logged with the measured rate; one that has read
nothing for `stuck_s` is cancelled, and its error names the bytes. An engine that runs elsewhere cannot be seen: there the
step's own deadline decides alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from headgate.errors import EngineError, WeightsMissed

log = logging.getLogger(__name__)
STUCK_S = 120.0
"""Seconds for what a load does without reading: to take memory, to round and to pack."""
_LOOK_S = 1.0
_REPORT_S = 10.0
ReadCount = Callable[[], int | None]
"""Returns the bytes that an engine has read since its start; None if they are not known. Blocks."""


class LoadWatch:
    """Watches loads of engines."""

    def __init__(
        self, stuck_s: float = STUCK_S, look_s: float = _LOOK_S, report_s: float = _REPORT_S
    ) -> None:
        """Create it. `look_s`: seconds between two readings; `report_s`: between two lines of the log."""
        self._stuck_s, self._look_s, self._report_s = stuck_s, look_s, report_s

    async def load(self, name: str, work: Awaitable[None], size: int, count: ReadCount) -> None:
        """Await the load of `size` bytes into an engine.

        Raise what it raises; WeightsMissed if it is stuck before it has read them, and EngineError if it is stuck later.
        """
        loading = asyncio.ensure_future(work)
        watching = asyncio.create_task(self._watch(name, size, count), name=f"load-of-{name}")
        try:
            await asyncio.wait((loading, watching), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                return loading.result()
            watching.result()  # raises: it only ends if the load is stuck, or cannot be seen
            await loading
        finally:
            for task in (loading, watching):
                task.cancel()
            await asyncio.gather(loading, watching, return_exceptions=True)

    async def _watch(self, name: str, size: int, count: ReadCount) -> None:
        began = advanced = reported = time.monotonic()
        first = last = await asyncio.to_thread(count)
        while last is not None and first is not None:
            await asyncio.sleep(self._look_s)
            found, now = await asyncio.to_thread(count), time.monotonic()
            if found is None:
                return
            advanced = now if found != last else advanced
            last = found
            progress = describe(last - first, size, advanced - began)
            if now - advanced >= self._stuck_s:
                raise _stuck(
                    f"{name} is stuck: {progress}, and nothing for {now - advanced:.0f} s",
                    last - first < size,
                )
            if now - reported >= self._report_s and now - advanced < self._report_s:
                log.info("%s loads: %s", name, progress)
                reported = now


def describe(read: int, size: int, seconds: float) -> str:
    """Return a load's progress in words. `read` and `size`: bytes."""
    rate = read / seconds if seconds > 0 else 0.0
    return f"it has read {read / 1e9:.2f} of {size / 1e9:.2f} GB, at {rate / 1e6:.0f} MB/s"


def _stuck(message: str, by_the_disk: bool) -> EngineError:
    """Return the error of a stuck load; the version is not to blame if its bytes did not come."""
    return (
        WeightsMissed(message, code="load_stuck") if by_the_disk else EngineError(message, code="load_stuck")
    )
