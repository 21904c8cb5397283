"""Ctrl-C and SIGTERM for a program that is one task: it ends in order, or at once.

Owns the handlers of both signals while the work runs. Invariants: the first signal cancels the work, which then ends what it
began; a second Ctrl-C ends the process, whatever still holds it. A second SIGTERM changes nothing: a parent that ends at the
same Ctrl-C sends one to its children.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STATUS = 130
"""The exit status of a program that Ctrl-C ended."""
AGAIN = "press ctrl-c again to end at once"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal ended the work."""


async def interruptible(work: Coroutine[Any, Any, T], say: Callable[[str], None], ending: str) -> T:
    """Return what the work does. At the first signal `say` gets what is `ending`. Raise Interrupted."""
    if threading.current_thread() is not threading.main_thread():  # no other thread can have signals
        return await work
    task = asyncio.create_task(work, name="interruptible")
    interrupted = False

    def heed(number: signal.Signals) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            say(f"{ending}; {AGAIN}")
            task.cancel()
        elif number == signal.SIGINT:
            os._exit(STATUS)

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, heed, number)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise Interrupted from None
        task.cancel()
        await asyncio.wait({task})
        raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
