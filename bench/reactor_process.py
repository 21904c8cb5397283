"""Objects in a few processes of their own, for actors that compute in Python: threads of one process would take turns (the GIL).

A parallel reaction calls its object and waits, and meanwhile other threads run. A place has many objects and does one call after
the other: with as many places as cores, none takes a core from another in the middle of a call. What an object answers depends on
its calls alone, so a program stays deterministic.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any


class Place:
    """A new process; the modules of what it is to make are imported before."""

    def __init__(self, *modules: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(modules))
        self._pipe, theirs = context.Pipe()
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._asked: deque[Future[Any]] = deque()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *request: Any) -> Any:
        """Waits for the answer. Raises EOFError if the process has ended, as it does when something raises."""
        answer: Future[Any] = Future()
        with self._sending:
            self._asked.append(answer)
            self._pipe.send(request)
        while not answer.done():
            with self._reading:
                if (
                    not answer.done()
                ):  # answers come in the order of the requests: this may be another thread's
                    self._asked.popleft().set_result(self._pipe.recv())
        return answer.result()

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join()


class Remote:
    """`make(*args)` in a place."""

    def __init__(self, place: Place, make: Callable[..., Any], *args: Any) -> None:
        self._place = place
        self._number: int = place.ask(None, make, args)

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the remote object and returns its answer."""
        return self._place.ask(self._number, method, args)


def _serve(pipe: Connection) -> None:
    made: list[Any] = []
    while True:
        try:
            number, what, given = pipe.recv()
        except EOFError:
            return
        if number is None:
            made.append(what(*given))
            pipe.send(len(made) - 1)
        else:
            pipe.send(getattr(made[number], what)(*given))
