"""Runners of agents' commands: on this machine as it is (`HostRunner`), or in a sandbox (`headgate.client.sandboxes`).

Invariant: when a run ends, however it ends, nothing of the agent's processes is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from headgate.processes.lines import kill_group, start_worker


class Killed(Exception):
    """An agent was killed. `reason`: the reason for which its episode is left out, such as `memory_limit`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CommandRunner(Protocol):
    """Run commands, many at a time."""

    async def open(self) -> None:
        """Check that commands can run here. Raise SandboxUnavailable."""

    def agent_url(self, base_url: str) -> str:
        """Return the URL by which an agent reaches an episode's URL."""

    async def run(
        self, argv: Sequence[str], env: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> int:
        """Run a command with `env`, and return its status. Raise Killed, and WorkerFailed if it cannot be started."""

    async def close(self) -> None:
        """End what `open` started."""


class HostRunner:
    """This machine, with all that the driver has."""

    async def open(self) -> None:
        """Nothing is needed."""

    def agent_url(self, base_url: str) -> str:
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
