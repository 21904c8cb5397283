"""Work that blocks, in a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """`work` in a thread. A cancellation waits for its end, so that nothing is at work on the learner beside what comes next."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(running)
    finally:
        if not running.done():
            await asyncio.wait({running})
