"""An object in a process of its own, for actors that compute in Python: threads of one process would take turns at it (the GIL).

A parallel reaction calls it and waits, and meanwhile other threads run. What it answers depends on the calls alone, so a program
stays deterministic.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Remote:
    """`make(*args)` in a new process; one call at a time."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([make.__module__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """Waits for the answer. Raises EOFError if the process has ended, as it does when the method raises."""
        self._pipe.send((method, args))
        return self._pipe.recv()

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    made = make(*args)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(made, method)(*given))
