"""Child processes that respond in lines: one JSON object in, one JSON object out.

Owns one operating-system process at a time. Invariants: it leads its own process group, and `end` leaves nothing of the group
behind; a response never counts for another question, because a process that failed to respond is ended; its kept error output is
bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import IO, Any

from headgate.processes.child import start_group

TAIL_BYTES = 64 * 1024
_QUOTED_LINES = 15
_DRAIN_S = 1.0
_EXIT_S = 5.0


class WorkerFailed(Exception):
    """A process could not be started, ended, or wrote an invalid reply; the message quotes its last lines."""


class LineWorker:
    """A process of `argv`; `name` is what errors call it. Used by one task at a time."""

    def __init__(self, argv: Sequence[str], name: str) -> None:
        self._argv = list(argv)
        self._name = name
        self._process: asyncio.subprocess.Process | None = None
        self._errors: _Tail | None = None

    @property
    def running(self) -> bool:
        """True while there is a process for requests."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start a process in place of the one before. Raise WorkerFailed."""
        await self.end()
        pipe = asyncio.subprocess.PIPE
        self._process = await start_worker(self._argv, pipe, pipe, pipe)
        assert self._process.stderr is not None
        self._errors = _Tail(self._process.stderr)

    async def ask(self, question: bytes) -> dict[str, Any]:
        """Write a line (without its end) and reads one. Raise WorkerFailed; then, and when cancelled, the process is ended."""
        try:
            await self.send(question)
            return await self._read()
        except BaseException:
            await self.end()
            raise

    async def send(self, line: bytes) -> None:
        """Write a line (without its end); what comes back, `listen` reads."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(line + b"\n")
            await self._process.stdin.drain()

    async def listen(self) -> dict[str, Any]:
        """Read a line that comes without a question. Raise WorkerFailed as `ask` does."""
        try:
            return await self._read()
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        """Kill the process, if there is one."""
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is not None and errors is not None:
            await kill_group(process)
            await errors.end()

    async def _read(self) -> dict[str, Any]:
        process, errors = self._process, self._errors
        assert process is not None and process.stdout is not None and errors is not None
        try:
            line = await process.stdout.readline()
        except ValueError as error:
            raise WorkerFailed(f"{self._name} wrote a line that is too long") from error
        if not line.endswith(b"\n"):
            # Its streams end shortly before the process does, and its status belongs in the message
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    await process.wait()
            await kill_group(process)
            stderr = quoted(await errors.end())
            raise WorkerFailed(f"{self._name} ended with {process.returncode}{stderr}")
        try:
            response = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, or nested too deep
            response = None
        if not isinstance(response, dict):
            raise WorkerFailed(f"{self._name} wrote no JSON object: {line[:200]!r}")
        return response


class _Tail:
    """The last `TAIL_BYTES` of a stream, read by a task so that its writer never blocks."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept = bytearray()
        self._task = asyncio.create_task(self._read(stream), name="worker-stderr")

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(TAIL_BYTES):
            self._kept += chunk
            del self._kept[:-TAIL_BYTES]

    async def end(self) -> str:
        """Return the kept output, once the writers are dead. Does not wait for a writer that left the process group."""
        await asyncio.wait({self._task}, timeout=_DRAIN_S)
        self._task.cancel()
        return self._kept.decode(errors="replace")


def quoted(errors: str) -> str:
    """Return the last lines that a process wrote, as the end of a message; empty if it wrote none."""
    lines = errors.rstrip().splitlines()[-_QUOTED_LINES:]
    return "\n".join(["; stderr:", *lines]) if lines else ""


async def start_worker(
    argv: Sequence[str],
    stdin: int,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    env: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start `argv` by `start_group`. Raise WorkerFailed."""
    try:
        return await start_group(argv, stdin, stdout, stderr, env)
    except OSError as error:
        raise WorkerFailed(f"cannot start {argv[0]}: {error}") from error


async def kill_group(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to the group. Waits for the process, but no longer than `_DRAIN_S` for a pipe that another holds open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await process.wait()
