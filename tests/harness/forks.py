"""Processes that tests kill and start again, forked from one that has imported everything, so that a start costs no seconds."""

from __future__ import annotations

import asyncio
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.harness.waiting import result_of

LIMIT_S = 600.0
GRACE_S = 10.0
LOADED = [
    "pytest",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "gateway.app",
    "gateway.store.schema",
    "renderers",
    "renderers.base",
    "renderers.gpt_oss",
    "renderers.parsers",
    "transformers.models.auto.tokenization_auto",
    "trainer.cli",
    "trainer.loop.run",
    "transformers.models.qwen3.modeling_qwen3",
    "pandas",  # pyarrow imports it when it sees a list
    "pyarrow.compute",
]


def forks() -> ForkServerContext:
    """Return the context for all of them: there is one server in a test session, and the first to start it sets what it loads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def start_server() -> None:
    """Start the server of forked programs, if it does not run; it imports what they need while this process continues."""
    forks()
    forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]  # which `share_server` replaces


def share_server() -> None:
    """Use the server that the parent of this process has started, if any; only the parent can ask whether it runs."""
    if forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def fork(work: Callable[..., None], *arguments: Any, log: Path | None = None) -> BaseProcess:
    """Start a process that calls a function of a module; its output is appended to `log`."""
    process = forks().Process(target=_work, args=(work, arguments, log), daemon=True)
    process.start()
    return process


def _work(work: Callable[..., None], arguments: tuple[Any, ...], log: Path | None) -> None:
    keep_what_is_loaded()
    if log is not None:
        log_to(log)
    work(*arguments)


def run_to_end(work: Callable[..., None], *arguments: Any, log: Path | None = None) -> int | None:
    """Call a function of a module in a process of its own, and return its exit status, or None if it did not end."""
    process = fork(work, *arguments, log=log)
    process.join(LIMIT_S)
    process.kill()
    return process.exitcode


def gateway_command(*arguments: str, folder: Path) -> tuple[int | None, str]:
    """Run `gateway ARGUMENTS` in a folder; return its exit status (None: it did not end), and its output."""
    return command("gateway.cli", *arguments, folder=folder)


def command(
    module: str, *arguments: str, folder: Path, missing: str = "", environ: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """`python -m MODULE ARGUMENTS`, as `gateway_command` does; it cannot import what is `missing`, and has `environ` too."""
    log = folder / "command.log"
    log.unlink(missing_ok=True)
    status = run_to_end(_command, module, arguments, folder, missing, environ or {}, log=log)
    return status, log.read_text()


class _Running:
    """A forked process while it runs."""

    def __init__(self, work: Callable[..., None], *arguments: Any, log: Path) -> None:
        self._process = fork(work, *arguments, log=log)

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.exitcode

    async def wait(self) -> int:
        """Wait until it ends; return its exit status."""
        watched, ended, loop = os.dup(self._process.sentinel), asyncio.Event(), asyncio.get_running_loop()
        try:
            loop.add_reader(watched, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)
        self._process.join()
        assert self.returncode is not None
        return self.returncode


class GatewayCommand(_Running):
    """`gateway ARGUMENTS` while it runs, the head of a process group. Its output is appended to `log`."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self.log = log
        super().__init__(_lead, arguments, Path.cwd(), log=log)

    async def wait(self) -> int:
        """Wait until it ends, ten minutes at most; return its exit status."""
        return await result_of(super().wait(), "the command ends", LIMIT_S)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for whatever of the group is left when it has ended or is late."""
        self._process.terminate()
        await asyncio.to_thread(self._process.join, GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.wait()


class Forked(_Running):
    """`python -m MODULE ARGUMENTS`, forked: the head of a session of its own, with what a subprocess of asyncio has."""

    def __init__(self, argv: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        """`argv`: the module and its arguments. Its output is appended to `log`."""
        super().__init__(_module, [*argv], {**environ}, log=log)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        os.kill(self.pid, number)


def _module(argv: list[str], environ: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _lead(arguments: tuple[str, ...], folder: Path) -> None:
    os.setsid()
    _command("gateway.cli", arguments, folder, "", {})


def _command(
    module: str, arguments: tuple[str, ...], folder: Path, missing: str, environ: Mapping[str, str]
) -> None:
    os.chdir(folder)
    os.environ.update(environ, COLUMNS="200")
    sys.argv = [module, *arguments]
    if missing:
        sys.modules[missing] = None  # type: ignore[assignment]
    importlib.import_module(module).main()


def keep_what_is_loaded() -> None:
    """Exempt what this process was forked with from garbage collection, which would copy its memory."""
    gc.freeze()


def log_to(log: Path) -> None:
    """Append this process's output to a file from now on."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = os.fdopen(out, "w", buffering=1)
