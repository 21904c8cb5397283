"""Run agents' commands in a sandbox, and kill those that exceed its limits.

Owns the socket to the gateway and the processes. Invariants: when a run ends, however it ends, nothing of the agent is left;
`open` shows by a trial that agents would be contained.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import IO, Any
from urllib.parse import urlsplit

from headgate.client.command_runner import Killed
from headgate.client.sandboxes.base import (
    URL,
    Contained,
    Sandbox,
    SandboxUnavailable,
)
from headgate.client.sandboxes.gateway_socket import GatewaySocket
from headgate.client.sandboxes.usage import UsageWatch
from headgate.processes.child import start_group
from headgate.processes.lines import kill_group, start_worker

_PIPE, _NULL = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
_TRIAL_S = 60.0
_REMOVAL_S = 30.0


class SandboxRunner:
    """Runs each command in its own sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._watch = UsageWatch(sandbox.limits)
        self._socket = GatewaySocket()

    async def open(self) -> None:
        """Open the socket to the gateway, and try the sandbox once. Raise SandboxUnavailable."""
        await self._socket.open()
        try:
            await self._try()
        except BaseException:
            await self.close()
            raise

    def agent_url(self, base_url: str) -> str:
        self._socket.connect_to(base_url)
        return URL + urlsplit(base_url).path

    async def run(
        self, argv: Sequence[str], env: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> int:
        name = f"headgate-{uuid.uuid4().hex}"
        command = self._sandbox.command(Contained(name, argv, tuple(env), self._socket.folder))
        process = await start_worker(command, _NULL, output, errors, env)
        try:
            status = await self._status(process)
        finally:
            await kill_group(process)
            await self._remove(name)
        if reason := self._sandbox.reason(status):
            raise Killed(f"its sandbox ended with {status}", reason)
        return status

    async def close(self) -> None:
        """Close the socket to the gateway."""
        await self._socket.close()

    async def _status(self, process: asyncio.subprocess.Process) -> int:
        if self._sandbox.enforces_limits:
            return await process.wait()
        excess = self._watch.begin(process.pid)
        waiting = asyncio.create_task(process.wait(), name="sandboxed-agent")
        both: set[asyncio.Future[Any]] = {waiting, excess}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            found = excess.result()
            raise Killed(f"killed, because it took {found.description}", found.reason)
        finally:
            waiting.cancel()
            self._watch.end(process.pid)

    async def _try(self) -> None:
        try:
            process = await start_group(self._sandbox.trial(self._socket.folder), _NULL, _PIPE, _PIPE)
        except OSError as error:
            raise SandboxUnavailable(self._sandbox.refusal(str(error))) from error
        try:
            async with asyncio.timeout(_TRIAL_S):
                _, output = await process.communicate()
        except TimeoutError as error:
            raise SandboxUnavailable(self._sandbox.refusal(f"no response within {_TRIAL_S:g} s")) from error
        finally:
            await kill_group(process)
        if process.returncode:
            words = " ".join(output.decode(errors="replace").split()) or f"it ended with {process.returncode}"
            raise SandboxUnavailable(self._sandbox.refusal(words))

    async def _remove(self, name: str) -> None:
        """End what outlives the command's own process, if it still exists."""
        if not (argv := self._sandbox.removal(name)):
            return
        process = await start_worker(argv, _NULL, _NULL, _NULL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REMOVAL_S):
                await process.wait()
