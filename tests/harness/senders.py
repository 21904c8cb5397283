"""The trainer's server that sends versions to engines, as a process that tests may kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from processes.child import die_with_parent
from processes.ports import free_port
from tests.harness.waiting import until

ROOT = Path(__file__).parents[2]


class Program:
    """A Python module as a process that listens on a loopback port."""

    def __init__(self, *argv: str, alive: str) -> None:
        """`alive`: a path that is answered with 200."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._argv, self._alive = argv, alive
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Starts it, and waits until it answers."""
        self._process = self._begun()
        async with httpx.AsyncClient(base_url=self.url) as http:

            async def answers() -> bool:
                try:
                    return (await http.get(self._alive)).status_code == 200
                except httpx.TransportError:
                    return False

            await until(answers, f"{self._argv[0]} answers")

    def _begun(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", *self._argv, "--port", str(self.port)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            preexec_fn=die_with_parent(),
        )

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def sender_of(directory: Path) -> Program:
    """A server of the versions in a directory."""
    argv = ("trainer.publish.sender", "--dir", str(directory), "--reached-at", "127.0.0.1")
    return Program(*argv, alive="/versions")


def fake_engine(weights: Path) -> Program:
    """A fake engine with weights."""
    return Program("gateway.engines.fake", "--weights", str(weights), alive="/health")
