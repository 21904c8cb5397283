"""Runs long work on text in threads, outside the event loop.

Owns the threads, which are few: tokenizing releases Python's lock, but the code around it does not, and every thread that wants
the lock delays the event loop. Reading requests has threads of its own, so that it does not wait for rendering.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_LONG = 4_000
"""Characters from which on rendering leaves the event loop; below, a thread costs more than the work."""
_LONG_BODY = 64_000
"""Bytes of a body from which on reading it leaves the event loop."""
_THREADS = 2
_SEQUENCES = (list, tuple)
_SIZED = (str, bytes, dict, *_SEQUENCES)
"""Named once: a union that is written where it is used is made at every use, and these are used for every value of a body."""


async def offload(measured: Any, work: Callable[[], T]) -> T:
    """Run work whose cost grows with the size of `measured`: directly if that is small, else in a thread."""
    return await offload_long(is_long(measured), work)


async def offload_long(long: bool, work: Callable[[], T]) -> T:
    """Run work in a thread if it is long, else directly."""
    return await _in_thread("render", work) if long else work()


async def offload_read(body: bytes, work: Callable[[], T]) -> T:
    """Run work on a request's body: directly if the body is short, else in a thread."""
    return await _in_thread("read", work) if len(body) >= _LONG_BODY else work()


def is_long(value: Any, most: int = _LONG) -> bool:
    """Return whether a value holds more than `most` characters and values together; stop counting there."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        most -= 1 + (len(item) if isinstance(item, _SIZED) else 0)
        if most < 0:
            return True
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, _SEQUENCES):
            waiting += item
    return False


async def _in_thread(name: str, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads(name), work)


@cache
def _threads(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, name)
