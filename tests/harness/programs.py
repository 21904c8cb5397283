"""Forked programs that listen on a loopback port, and that tests may kill with SIGKILL and start again."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from headgate.processes.ports import free_port
from tests.harness.forks import fork
from tests.harness.waiting import until


class Program:
    """A program and its present life."""

    def __init__(
        self, port: int, alive: str, work: Callable[..., None], *arguments: Any, log: Path | None = None
    ) -> None:
        """`alive`: a path that is served with 200 once the program is ready."""
        self.url = f"http://127.0.0.1:{port}"
        self._alive, self._work, self._arguments, self._log = alive, work, arguments, log
        self._process: BaseProcess | None = None

    async def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._process = process = fork(self._work, *self._arguments, log=self._log)
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as http:

            async def ready() -> bool:
                assert process.is_alive(), self._log.read_text() if self._log else self._arguments
                try:
                    return (await http.get(self._alive)).status_code == 200
                except httpx.HTTPError:
                    return False

            await until(ready, f"{self.url}{self._alive} is ready")

    @property
    def pid(self) -> int:
        """Return the id of the present or the last process."""
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def module(*argv: str, alive: str) -> Program:
    """Return a Python module as a program, as `python -m` would run it."""
    port = free_port()
    return Program(port, alive, _run, (*argv, "--port", str(port)))


def sender_of(directory: Path) -> Program:
    """Return a server of the versions in a directory."""
    argv = ("trainer.publish.sender", "--dir", str(directory), "--engine-facing-host", "127.0.0.1")
    return module(*argv, alive="/versions")


def fake_engine(weights: Path) -> Program:
    """Return a fake engine with weights."""
    return module("gateway.engines.fake", "--weights", str(weights), alive="/health")


def gateway(values: dict[str, Any], log: Path) -> Program:
    """Return a gateway with `values` as `Settings.parse` takes them; its engines are external, so they outlive it."""
    return Program(values["server"]["port"], "/readyz", _serve, values, log=log)


def _run(argv: tuple[str, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    sys.argv = [*argv]
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _serve(values: dict[str, Any]) -> None:
    import uvicorn

    from gateway.app import create_app
    from gateway.config.settings import Settings

    settings = Settings.parse(values)
    uvicorn.run(create_app(settings), port=settings.server.port, log_level="warning")
