"""The order in which mirrors fetch a version: over the link to a zone once, then within it in a tree from one another.

Invariants: the root serves its own zone (that of mirrors without one) and the first mirror of each other zone; each that has the
version serves `width` others of its zone at a time, so the time to the last grows with the logarithm of their number.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping

WIDTH = 2
"""The number of mirrors that fetch from one source concurrently."""


async def fan_out(
    root: str,
    zones: Mapping[str, str],
    fetch: Callable[[str, list[str]], Awaitable[None]],
    width: int = WIDTH,
) -> dict[str, Exception]:
    """Have each mirror `fetch(mirror, sources)` once, in all zones concurrently. `zones`: each mirror's; "" is the root's.

    `sources` begins with the one that is free for this mirror, and ends with the root. Return the mirrors that failed, which
    are not a source for others, and why.
    """
    failed: dict[str, Exception] = {}

    async def fetched(mirror: str, source: str) -> bool:
        try:
            await fetch(mirror, [source] if source == root else [source, root])
        except Exception as error:
            failed[mirror] = error
        return mirror not in failed

    async def within(mirror: str, free: asyncio.Queue[str]) -> None:
        source = await free.get()
        if await fetched(mirror, source):
            _serve(free, mirror, width)
        free.put_nowait(source)

    async def into(zone: str, mirrors: list[str]) -> None:
        free: asyncio.Queue[str] = asyncio.Queue()
        if not zone:
            _serve(free, root, width)
        while mirrors and free.empty():
            first = mirrors.pop(0)
            if await fetched(first, root):
                _serve(free, first, width)
        async with asyncio.TaskGroup() as group:
            for mirror in mirrors:
                group.create_task(within(mirror, free), name=f"weights-to-{mirror}")

    mirrors_of: defaultdict[str, list[str]] = defaultdict(list)
    for mirror, zone in zones.items():
        mirrors_of[zone].append(mirror)
    async with asyncio.TaskGroup() as group:
        for zone, mirrors in mirrors_of.items():
            group.create_task(into(zone, mirrors), name=f"weights-to-zone-{zone}")
    return failed


def _serve(free: asyncio.Queue[str], source: str, width: int) -> None:
    for _ in range(width):
        free.put_nowait(source)
