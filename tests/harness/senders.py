"""The trainer's server that sends versions to engines, as a process that tests may kill."""

from __future__ import annotations

import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from processes.ports import free_port
from tests.harness.forks import forks, keep_what_is_loaded
from tests.harness.waiting import until


class Program:
    """A Python module, run as `python -m` would, in a forked process that listens on a loopback port."""

    def __init__(self, *argv: str, alive: str) -> None:
        """`alive`: a path that is answered with 200."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._argv, self._alive = argv, alive
        self._process: BaseProcess | None = None

    async def start(self) -> None:
        """Starts it, and waits until it answers."""
        argv = (*self._argv, "--port", str(self.port))
        self._process = forks().Process(target=_main, args=(argv,), daemon=True)
        self._process.start()
        async with httpx.AsyncClient(base_url=self.url) as http:

            async def answers() -> bool:
                try:
                    return (await http.get(self._alive)).status_code == 200
                except httpx.TransportError:
                    return False

            await until(answers, f"{self._argv[0]} answers")

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _main(argv: tuple[str, ...]) -> None:
    import torch

    keep_what_is_loaded()
    torch.set_num_threads(1)
    sys.argv = [*argv]
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def sender_of(directory: Path) -> Program:
    """A server of the versions in a directory."""
    argv = ("trainer.publish.sender", "--dir", str(directory), "--engine-facing-host", "127.0.0.1")
    return Program(*argv, alive="/versions")


def fake_engine(weights: Path) -> Program:
    """A fake engine with weights."""
    return Program("gateway.engines.fake", "--weights", str(weights), alive="/health")
