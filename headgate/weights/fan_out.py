"""The order in which mirrors fetch a version: from the root and from one another, so that the root sends few copies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

WIDTH = 2
"""The number of mirrors that fetch from one source concurrently."""


async def fan_out(
    root: str, mirrors: Iterable[str], fetch: Callable[[str, list[str]], Awaitable[None]], width: int = WIDTH
) -> dict[str, Exception]:
    """Have each mirror `fetch(mirror, sources)` once; every mirror that is done is a source for `width` others at a time.

    `sources` begins with the one that is free for this mirror, and ends with the root. Return the mirrors that failed, which
    are not a source for others, and why.
    """
    free: asyncio.Queue[str] = asyncio.Queue()
    for _ in range(width):
        free.put_nowait(root)
    failed: dict[str, Exception] = {}

    async def bring(mirror: str) -> None:
        source = await free.get()
        try:
            await fetch(mirror, [source] if source == root else [source, root])
        except Exception as error:
            failed[mirror] = error
        else:
            for _ in range(width):
                free.put_nowait(mirror)
        finally:
            free.put_nowait(source)

    async with asyncio.TaskGroup() as group:
        for mirror in mirrors:
            group.create_task(bring(mirror), name=f"weights-to-{mirror}")
    return failed
