"""The processes of the system under test: gateways, engines, Redis, trainer and agents, each of which may be killed and started.

Owns every child, in a session of its own. A process that exits by itself is started again, as its supervisor would, until `end`.
A run may fork its Python programs from a process that has imported everything, so that a start takes no seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from examples.service.programs import find_program
from gateway.config import EngineSettings, ModelSettings
from gateway.engines.process import _VLLM_ENV, _vllm_command
from tests.harness.forks import Forked
from tests.harness.gateway_command import write_toml
from tests.harness.transports import server_argv
from tests.harness.vllm import PYTHON, vllm_settings

MARKS_EACH = 2**22
"""Marks of one fake engine's log, over all of its lives."""
_AGAIN_S = 0.5


class Process:
    """One child, restarted until `end`."""

    def __init__(
        self, name: str, command: Callable[[], Sequence[str]], log: Path, env: dict[str, str] | None = None
    ) -> None:
        """`command` is called at each start."""
        self.forked = False
        """True: `python -m MODULE` is forked (`tests.harness.forks`)."""
        self.name = name
        self.starts = 0
        self.paused = False
        self.on_exit: Callable[[str, int], None] = lambda _name, _code: None
        """Called when it has exited and was not killed."""
        self._command = command
        self._log = log
        self._env = {**os.environ, **(env or {})}
        self._child: asyncio.subprocess.Process | Forked | None = None
        self._killed = False
        self._ending = False
        self._may_start = asyncio.Event()
        """Set: it may be started again."""
        self._may_start.set()
        self._restarter: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, and restart it whenever it exits."""
        await self._spawn()
        self._restarter = asyncio.create_task(self._restart(), name=f"restart-{self.name}")

    @property
    def alive(self) -> bool:
        """Return whether it runs."""
        return self._child is not None and self._child.returncode is None

    async def kill(self, down_s: float) -> bool:
        """Kill its process group, and restart it after some seconds. Return False if it did not run."""
        if not self.alive:
            return False
        self._killed = True
        self._may_start.clear()
        self._signal(signal.SIGKILL)
        try:
            await asyncio.sleep(down_s)
        finally:
            self._may_start.set()
        return True

    async def pause(self, seconds: float) -> None:
        """Send SIGSTOP, and SIGCONT after some seconds."""
        self._signal(signal.SIGSTOP)
        self.paused = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self.paused = False
            self._signal(signal.SIGCONT)

    async def end(self, patience_s: float, how: signal.Signals = signal.SIGTERM) -> bool:
        """Stop it; return whether it exited within `patience_s`, before SIGKILL."""
        self._ending = True
        self._may_start.set()
        self._signal(signal.SIGCONT)
        if patience_s and self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                self._child.send_signal(how)
        exited = True
        try:
            async with asyncio.timeout(patience_s):
                if self._child is not None:
                    await self._child.wait()
        except TimeoutError:
            exited = False
        self._signal(signal.SIGKILL)
        if self._restarter is not None:
            self._restarter.cancel()
            await asyncio.gather(self._restarter, return_exceptions=True)
        if self._child is not None:
            await self._child.wait()
        return exited

    async def _restart(self) -> None:
        while True:
            assert self._child is not None
            code = await self._child.wait()
            if self._ending:
                return
            if not self._killed:
                self.on_exit(self.name, code)
                await asyncio.sleep(_AGAIN_S)
            self._killed = False
            await self._may_start.wait()
            if not self._ending:
                await self._spawn()

    async def _spawn(self) -> None:
        self.starts += 1
        self._log.parent.mkdir(parents=True, exist_ok=True)
        argv = self._command()
        if self.forked and [*argv[:2]] == [sys.executable, "-m"]:
            self._child = await asyncio.to_thread(Forked, argv[2:], self._log, self._env)
            return
        with self._log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *argv, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
                env=self._env, start_new_session=True,
            )  # fmt: skip

    def _signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)


def fake_engine(number: int, name: str, port: int, weights: Path, logs: Path, delay_s: float) -> Process:
    """Return a fake engine that logs its samples; each life continues the marks of the one before."""
    log = logs / f"{name}.jsonl"

    def command() -> list[str]:
        first = max(_last_mark(log), number * MARKS_EACH) + 1
        return [
            *(sys.executable, "-m", "gateway.engines.fake", "--weights", str(weights), "--port", str(port)),
            *("--delay-s", str(delay_s), "--log", str(log), "--first-mark", str(first)),
        ]

    logs.mkdir(parents=True, exist_ok=True)
    return Process(name, command, logs / f"{name}.log")


def vllm_engine(name: str, port: int, weights: Path, logs: Path) -> Process:
    """Return real vLLM on the CPU."""
    values = vllm_settings(logs / f"{name}.log")
    settings, model = EngineSettings(**values), ModelSettings(path=weights)
    argv = [*_vllm_command(settings, model, "demo", str(weights), "127.0.0.1", port), *settings.args]
    return Process(name, lambda: argv, logs / f"{name}.log", _VLLM_ENV | settings.env)


def gateway(name: str, values: dict[str, Any], folder: Path, command: Sequence[str] = ()) -> Process:
    """Return a gateway with a TOML file of its own. `command` replaces `python -m gateway.cli`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = write_toml(values, folder / f"{name}.toml")
    argv = [*(command or (sys.executable, "-m", "gateway.cli")), "serve", "--config", str(config)]
    return Process(name, lambda: argv, folder / f"{name}.log")


def redis(port: int, folder: Path) -> Process:
    """Return Redis that keeps nothing on disk."""
    argv = [
        *(str(find_program("redis-server")), "--port", str(port), "--bind", "127.0.0.1"),
        *("--save", "", "--appendonly", "no", "--dir", str(folder)),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    return Process("redis", lambda: argv, folder / "redis.log")


def server_of_versions(transport: str, port: int, versions: Path, logs: Path) -> Process:
    """Return the trainer's server of a folder of versions."""
    argv = [sys.executable, "-m", *server_argv(transport, versions), "--port", str(port)]
    return Process("server", lambda: argv, logs / "server.log")


def python(name: str, module: str, plan: Path, logs: Path) -> Process:
    """Return a process of the harness: the trainer, or the agents."""
    return Process(name, lambda: [sys.executable, "-m", module, str(plan)], logs / f"{name}.log")


def has_vllm() -> bool:
    """Return whether vLLM's CPU build is installed."""
    return PYTHON.exists()


def _last_mark(log: Path) -> int:
    """Return the newest mark of a log, read from its end."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for span in (2**16, 2**24, size):
            file.seek(max(0, size - span))
            marks = [_mark(line) for line in file.read().splitlines()]
            if found := [mark for mark in marks if mark]:
                return found[-1]
    return 0


def _mark(line: bytes) -> int:
    if not line.startswith(b"["):
        return 0
    try:
        return int(orjson.loads(line)[0])
    except orjson.JSONDecodeError:
        return 0
