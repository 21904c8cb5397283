"""A child process on this machine.

Owns one operating-system process and everything it starts: the child leads a process group of its own, is set to die with
its parent, and `stop` leaves nothing of the group behind. Its output goes to a log file, whose tail is quoted when it dies, or
where its parent's goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from headgate.processes import dependent as dependent_program
from headgate.processes.errors import ChildDied
from headgate.processes.slow import reported

_MOST_READ = 2**20
LINE_BYTES = 2**20
"""The longest line that can be read from a child."""


class LocalProcess:
    """One child process. Start it with `LocalProcess.start`."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, log: Path | None, begun_at: int = 0
    ) -> None:
        """`begun_at`: how long the log was before."""
        self.name = name
        self.log = log
        self._process = process
        self._begun_at = begun_at

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], log: Path | None, env: Mapping[str, str] | None = None
    ) -> LocalProcess:
        """Start `argv` with its output appended to `log`; `env` is added to this process's environment. Raise ChildDied."""
        try:
            with _output(log) as output:
                begun_at = output.tell() if output is not None else 0  # codespell:ignore tell
                process = await start_group(argv, asyncio.subprocess.DEVNULL, output, output, env)
        except OSError as error:
            what = error.filename or argv[0]
            raise ChildDied(f"{name} cannot be started: {what}: {error.strerror or error}") from error
        return cls(name, process, log, begun_at)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the child runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the child ends; return its exit status."""
        return await self._process.wait()

    async def ready(
        self,
        check: Callable[[], Awaitable[bool]],
        timeout_s: float,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Poll `check` until it holds; `report` gets what takes long. Raise ChildDied or TimeoutError, which names the child."""
        what = f"{self.name} to be ready, for up to {timeout_s:g} s; its log is {self.log}"
        try:
            async with asyncio.timeout(timeout_s):
                with reported(report or _ignore, what):
                    while not await check():
                        self._raise_if_dead()
                        await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise TimeoutError(f"{self.name} was not ready within {timeout_s:g} s; see {self.log}") from error
        # Another process may have served the check, on a port that the child did not get.
        self._raise_if_dead()

    def _raise_if_dead(self) -> None:
        if self.returncode is not None:
            raise ChildDied(self.exit_report())

    def exit_report(self) -> str:
        """Return how the child ended, with the last lines of its log if there are any."""
        lines = self.tail()
        return f"{self.name} ended with {self.returncode}" + (f"; {self.log}:\n{lines}" if lines else "")

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError):
            if self.log is None:
                return ""
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def output(self) -> str:
        """Return what the process has written to its log, up to a megabyte."""
        with contextlib.suppress(OSError):
            if self.log is None:
                return ""
            with self.log.open("rb") as log:
                log.seek(self._begun_at)
                return log.read(_MOST_READ).decode(errors="replace")
        return ""

    async def stop(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM, then SIGKILL to the rest of the group after `grace_s`; with 0, SIGKILL immediately."""
        try:
            if self.returncode is None and grace_s > 0:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._process.wait()
        finally:
            self._signal(signal.SIGKILL)
        await self._process.wait()

    def terminate(self) -> None:
        """SIGTERM to the whole group; nothing is waited for."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


async def start_group(
    argv: Sequence[str],
    stdin: int,
    stdout: int | IO[bytes] | None,
    stderr: int | IO[bytes] | None,
    env: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start `argv` as the head of a process group, which dies with this process; `env` is added to its own. Raise OSError."""
    environment = {**os.environ, **(env or {})}
    _find(argv[0], environment.get("PATH"))
    return await asyncio.create_subprocess_exec(
        *dependent(argv),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        limit=LINE_BYTES,
        start_new_session=True,
    )


def _ignore(_text: str) -> None:
    """Ignore a report."""


@contextlib.contextmanager
def _output(log: Path | None) -> Iterator[BinaryIO | None]:
    """Yield the file to write to; None for the parent's own output."""
    if log is None:
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        yield output


def dependent(argv: Sequence[str]) -> list[str]:
    """Return a command that runs `argv` as a program that ends when the thread that starts it does: `dependent.py`."""
    return [sys.executable, "-I", "-S", dependent_program.__file__, str(os.getpid()), *argv]


def _find(program: str, path: str | None) -> None:
    """Raise OSError, as a start would, for a program that cannot be started."""
    if shutil.which(program, path=path) is None:
        number = errno.EACCES if os.path.exists(program) else errno.ENOENT
        raise OSError(number, os.strerror(number), program)
