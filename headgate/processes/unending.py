"""The event loop of a program that runs foreign code: the program ends although that code leaves tasks or threads that do not.

Owns the loop. Invariant: the end of the program waits at most twice `_GRACE_S` for what its main task has left.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_GRACE_S = 2.0


class Program:
    """Run a main task once, then exit with a status."""

    def __init__(self) -> None:
        self._left = False

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Return what `main` does, after a bounded wait for the tasks and threads that it has left."""
        before = set(threading.enumerate())
        runner = asyncio.Runner()
        pool = ThreadPoolExecutor(thread_name_prefix="asyncio")
        runner.get_loop().set_default_executor(pool)
        try:
            return runner.run(main)
        finally:
            refused = runner.run(_refuse_to_end())
            pool.shutdown(wait=False, cancel_futures=True)
            self._left = refused or _threads_go_on(before)
            if not self._left:  # it would wait for them
                runner.close()

    def exit(self, status: int) -> NoReturn:
        """End the process. Python's own end would wait for threads, and report tasks as destroyed.

        In another thread than the main one, the process is not this program's to end.
        """
        if self._left and threading.current_thread() is threading.main_thread():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        raise SystemExit(status)


async def _refuse_to_end() -> bool:
    """Cancel all other tasks; return true if some continue."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_GRACE_S)
    return any(not task.done() for task in left)


def _threads_go_on(before: set[threading.Thread]) -> bool:
    """Return true if threads are running for which Python would wait at its end, except those of `before`."""
    limit = time.monotonic() + _GRACE_S
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                return True
    return False
