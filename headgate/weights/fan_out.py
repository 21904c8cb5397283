"""The order in which mirrors fetch a version: from the root and from one another, so that the root sends few copies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

WIDTH = 2
"""Mirrors that fetch from one source at once."""


async def fan_out(
    root: str, mirrors: Iterable[str], fetch: Callable[[str, list[str]], Awaitable[None]], width: int = WIDTH
) -> dict[str, Exception]:
    """Has each mirror `fetch(mirror, sources)` once; every mirror that is done is a source for `width` others at once.

    `sources` begins with the one that is free for this mirror, and ends with the root. Answers the mirrors that failed, which
    are no source for anybody, and why.
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
