"""Ctrl-C and SIGTERM for a program that is one task: it ends in order, or immediately.

Owns the handlers of both signals while the work runs. Invariants: the first signal cancels the work, which then ends what it
began; a second Ctrl-C ends the process, whatever holds it, also code that blocks the event loop. A second SIGTERM changes
nothing: a parent that ends at the same Ctrl-C sends one to its children.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from headgate.processes.slow import SILENT_S

T = TypeVar("T")

STATUS = 130
"""The exit status of a program that Ctrl-C ended."""
HINT = "press ctrl-c again to end immediately"
BLOCKED = (
    "interrupted, but code in this process blocks the event loop (time.sleep or a synchronous client in an async function?):"
    f" waiting for it; {HINT}"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal ended the work."""


async def interruptible(work: Coroutine[Any, Any, T], report: Callable[[str], None], ending: str) -> T:
    """Return what the work does. At the first signal `report` gets what is `ending`. Raise Interrupted.

    `report` is called in another thread if the event loop is blocked.
    """
    if threading.current_thread() is not threading.main_thread():  # no other thread can have signals
        return await work
    task = asyncio.create_task(work, name="interruptible")
    interruption = _Interruption(task, report, ending)
    try:
        with interruption.handlers():
            return await task
    except asyncio.CancelledError:
        if interruption.begun:
            raise Interrupted from None
        task.cancel()
        await asyncio.wait({task})
        raise


def run_interruptible(work: Coroutine[Any, Any, T], report: Callable[[str], None], ending: str) -> T:
    """Return what the work of a program does. Exit with `STATUS` if a signal ends it."""
    try:
        return asyncio.run(interruptible(work, report, ending))
    except Interrupted:
        raise SystemExit(STATUS) from None


@contextmanager
def exit_at_ctrl_c() -> Iterator[None]:
    """End a program without an event loop with `STATUS`, and not with a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(STATUS) from None


class _Interruption:
    """The end of a task at a signal. `begun`: there was one."""

    def __init__(self, task: asyncio.Task[Any], report: Callable[[str], None], ending: str) -> None:
        self._task = task
        self._report = report
        self._ending = ending
        self._loop = asyncio.get_running_loop()
        self._received: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True: a signal has come. False: the loop has reacted, or the work is over. Its `put` may interrupt itself."""
        self.begun = False

    @contextmanager
    def handlers(self) -> Iterator[None]:
        """Handle both signals. The loop's own handlers would run only when the loop does."""
        before = {number: signal.signal(number, self._heed) for number in _SIGNALS}
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        try:
            yield
        finally:
            self._received.put(False)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _heed(self, number: int, _frame: FrameType | None) -> None:
        if not self.begun:
            self.begun = True
            self._received.put(True)
            self._loop.call_soon_threadsafe(self._react)
        elif number == signal.SIGINT:
            os._exit(STATUS)

    def _react(self) -> None:
        self._received.put(False)
        self._report(f"{self._ending}; {HINT}")
        self._task.cancel()

    def _watch(self) -> None:
        """Report a loop that does not react to the first signal."""
        if not self._received.get():
            return
        try:
            self._received.get(timeout=SILENT_S)
        except queue.Empty:
            self._report(BLOCKED)
