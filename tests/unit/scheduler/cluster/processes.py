"""A process that a supervisor keeps, without an operating system."""

from __future__ import annotations

import asyncio

from headgate.processes.supervised import ProcessEnded


class Process:
    """A process that ends when the test ends it."""

    def __init__(self, name: str) -> None:
        self.name, self.host, self.port = name, "127.0.0.1", 1
        self.stopped = False
        self.grace_s: float | None = None
        self.ended: asyncio.Future[ProcessEnded] = asyncio.get_running_loop().create_future()

    async def wait(self) -> ProcessEnded:
        return await asyncio.shield(self.ended)

    async def stop(self, grace_s: float) -> None:
        self.stopped = True
        self.grace_s = grace_s
