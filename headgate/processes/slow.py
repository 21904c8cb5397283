"""Reports what takes long, so that no program waits silently."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENT_S = 2.0
"""How long something may take before it is reported."""


@contextmanager
def reported(report: Callable[[str], None], what: str, after_s: float = SILENT_S) -> Iterator[None]:
    """Report, once, what a block waits for if it takes longer than `after_s`."""
    timer = asyncio.get_running_loop().call_later(after_s, report, f"waiting for {what}")
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def in_progress(report: Callable[[str], object], what: str, after_s: float = SILENT_S) -> Iterator[None]:
    """Report, once, what a block without an event loop does if it takes longer than `after_s`."""
    timer = threading.Timer(after_s, report, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
