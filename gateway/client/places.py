"""Places where the command of an agent runs: on this machine as it is (`Host`), or in a sandbox (`gateway.client.sandboxes`).

Invariant: when a run ends, however it ends, nothing of the agent's processes is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from processes.lines import kill_group, start_worker


class Killed(Exception):
    """An agent was ended from outside. `reason`: a word for why its episode is left out, such as `memory_limit`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Place(Protocol):
    """Runs commands, many at a time."""

    async def open(self) -> None:
        """Makes sure that commands can run here. Raises SandboxUnavailable."""

    def reach(self, base_url: str) -> str:
        """The URL by which an agent here reaches an episode's URL."""

    async def run(
        self, argv: Sequence[str], env: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> int:
        """Runs a command with `env`, and returns its status. Raises Killed, and WorkerFailed if it cannot be started."""

    async def close(self) -> None:
        """Ends what `open` began."""


class Host:
    """This machine, with all that the driver has."""

    async def open(self) -> None:
        """Nothing is needed."""

    def reach(self, base_url: str) -> str:
        return base_url

    async def run(
        self, argv: Sequence[str], env: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> int:
        process = await start_worker(argv, asyncio.subprocess.DEVNULL, output, errors, env)
        try:
            return await process.wait()
        finally:
            await kill_group(process)

    async def close(self) -> None:
        """Nothing outlives a run."""
