"""Waiting for a condition, with a name for what did not come; and letting others go on, without any time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest


async def until(
    condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 60.0, every_s: float = 0.02
) -> None:
    """Waits for a condition; fails with `what` if it does not come true in time, which is long, for a machine may be slow."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                held = condition()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(every_s)
    except TimeoutError:
        pytest.fail(f"not within {timeout_s:g} s: {what}")


async def turns(count: int = 20) -> None:
    """Gives everybody else so many turns of the event loop: what may happen without time passing has happened."""
    for _ in range(count):
        await asyncio.sleep(0)
