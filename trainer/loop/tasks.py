"""Tasks of the loop: work with companions that must not end before it, and blocking work in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Companion:
    """Work that has to continue for as long as other work needs it."""

    name: str
    work: Coroutine[Any, Any, Any]


async def run_with_companions(work: Coroutine[Any, Any, T], *companions: Companion | None) -> T:
    """Return the result of `work`. If a companion ends first, cancel `work` and raise the companion's error."""
    main = asyncio.create_task(work, name="trainer: loop")
    tasks = [asyncio.create_task(c.work, name=f"trainer: {c.name}") for c in companions if c]
    try:
        ended, _ = await asyncio.wait({main, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if main not in ended:
            companion = ended.pop()
            await companion
            raise RuntimeError(f"{companion.get_name()} ended although it was needed")
        return await main
    finally:
        for task in (main, *tasks):
            task.cancel()
        await asyncio.gather(main, *tasks, return_exceptions=True)


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in a thread, and return its result.

    A cancellation waits for its end, so that no thread still uses the trainer when the next work begins.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(running)
    finally:
        if not running.done():
            await asyncio.wait({running})
