"""Waiting for something, with a name for what did not come; and letting others go on, without any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
LONG_S = 300.0
"""Far more than anything takes, for a machine may be slow."""


@asynccontextmanager
async def within(what: str, timeout_s: float = LONG_S) -> AsyncIterator[None]:
    """Fail with `what`, which is to happen in the block, if the block takes longer."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        pytest.fail(f"not within {timeout_s:g} s: {what}")


async def result_of(work: Awaitable[T], what: str, timeout_s: float = LONG_S) -> T:
    """Return the result of `work`; fail with `what` if it does not end in time."""
    async with within(what, timeout_s):
        return await work


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    what: str,
    timeout_s: float = LONG_S,
    every_s: float = 0.02,
) -> None:
    """Wait for a condition; fail with `what` if it does not come true in time."""
    async with within(what, timeout_s):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(every_s)


async def while_going_on(event: Awaitable[T], other: asyncio.Future[Any], what: str) -> T:
    """Return the result of `event`, which comes while `other` goes on; fail with `what` if `other` ends first, or as it did."""
    first = asyncio.ensure_future(event)
    await asyncio.wait({first, other}, return_when=asyncio.FIRST_COMPLETED)
    if first.done():
        return first.result()
    first.cancel()
    other.result()
    pytest.fail(what)


async def turns(count: int = 20) -> None:
    """Give all other tasks `count` turns of the event loop: what may happen without time passing has happened."""
    for _ in range(count):
        await asyncio.sleep(0)


class TimeLimits:
    """The time limits (`asyncio.timeout`) of a module: none ends before the test ends it, however slow the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self._newest = asyncio.timeout(None)
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": self._timeout}))

    def _timeout(self, _seconds: float | None) -> asyncio.Timeout:
        self._newest = asyncio.timeout(None)
        return self._newest

    def end(self) -> None:
        """End the one that began last."""
        self._newest.reschedule(asyncio.get_running_loop().time())
