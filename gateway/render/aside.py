"""Long work on text, beside the event loop.

Owns the threads for it, which are few: tokenizing leaves the lock of Python, but what surrounds it does not, and every thread
that wants the lock makes the event loop wait for its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_LONG = 4_000
"""Characters from which on work leaves the event loop; below, a thread costs more than the work."""
_THREADS = 2


async def aside(messages: Sequence[dict[str, Any]], work: Callable[[], T]) -> T:
    """Does work whose cost grows with the text of `messages`: at once if that is short, else in a thread."""
    if sum(_characters(message.get("content")) for message in messages) < _LONG:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(), work)


def _characters(content: Any) -> int:
    if isinstance(content, list):
        return sum(len(part.get("text") or "") for part in content)
    return len(content or "")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "render")
