"""Foreign code in this process (an agent function, a match), run as a task of its own.

Owns that task and the tasks that it starts. Invariants: whatever the code raises or cancels ends its own run and nothing else;
a run that failed, overran or was cancelled leaves no task behind, except one that refuses to be cancelled, which is logged.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableSet
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")
log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""How long a cancelled task may take to end."""
_started: contextvars.ContextVar[MutableSet[asyncio.Task[Any]]] = contextvars.ContextVar("started")
"""The tasks that the run of the current context has started."""


class RanIntoCancel(Exception):
    """Foreign code ended as cancelled although its caller did not cancel it."""

    def __init__(self) -> None:
        super().__init__("CancelledError came out of it: something that it awaited was cancelled")


class Overran(Exception):
    """Foreign code took longer than it may, or returned too late because it had blocked the event loop."""


class Exited(Exception):
    """Foreign code raised an exception that is meant to end a program, such as SystemExit."""


async def run_foreign(
    work: Callable[[], Awaitable[T]],
    name: str,
    *,
    until: asyncio.Future[Any] | None = None,
    limit_s: float | None = None,
    children: bool = False,
) -> T | None:
    """Return what `work` does, or None if `until` is done first; a run that did not return is cancelled.

    `children`: the tasks that it started are cancelled with it. Raise Overran after `limit_s`, and what the work raises, as an
    Exception: RanIntoCancel for a leaked CancelledError, and Exited.
    """
    tasks: MutableSet[asyncio.Task[Any]] = WeakSet()
    context = contextvars.copy_context()
    if children:
        _track_tasks(asyncio.get_running_loop())
        context.run(_started.set, tasks)
    running = asyncio.create_task(_run(work, limit_s), name=name, context=context)
    tasks.add(running)
    ends = {running} if until is None else {running, until}
    try:
        done, _ = await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if running in done:
            return _result(running)
        if not done:
            raise Overran
    except BaseException:
        await cancel(tasks)
        raise
    await cancel(tasks)
    return None


async def cancel(tasks: MutableSet[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and the tasks that they still start; wait `_GRACE_S` for their end."""
    limit = asyncio.get_running_loop().time() + _GRACE_S
    while left := {task for task in tasks if not task.done()}:
        if (remaining := limit - asyncio.get_running_loop().time()) <= 0:
            for task in left:
                log.warning("the task %s was cancelled, but is still running", task.get_name())
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=remaining)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieve it: the run's own error explains the failure


async def _run(work: Callable[[], Awaitable[T]], limit_s: float | None) -> T:
    began = time.monotonic()
    try:
        result = await work()
    except SystemExit as error:  # it would end this process, as it ends an agent's own
        raise Exited(f"it called sys.exit({error.code!r})") from error
    except KeyboardInterrupt as error:  # its own: Ctrl-C is handled in another way
        raise Exited("it raised KeyboardInterrupt") from error
    if limit_s is not None and time.monotonic() - began > limit_s:  # no timer runs while the loop is blocked
        raise Overran
    return result


def _result(task: asyncio.Task[T]) -> T:
    try:
        return task.result()
    except asyncio.CancelledError as error:
        raise RanIntoCancel from error
    except Exception:
        raise
    except BaseException as error:
        raise Exited(f"{type(error).__name__}: {error}") from error


class _Tracking:
    """A task factory that notes the tasks which a run starts; `inner`: the loop's factory before."""

    def __init__(self, inner: Callable[..., Any] | None) -> None:
        self._inner = inner

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        task = (self._inner or _plain)(loop, work, **options)
        context = options.get("context")
        started = _started.get(None) if context is None else context.get(_started)
        if started is not None:
            started.add(task)
        return task


def _plain(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> Any:
    return asyncio.Task(work, loop=loop, **options)


def _track_tasks(loop: asyncio.AbstractEventLoop) -> None:
    if not isinstance(before := loop.get_task_factory(), _Tracking):
        loop.set_task_factory(_Tracking(before))
