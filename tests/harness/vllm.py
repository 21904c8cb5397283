"""Real vLLM on the CPU, as small and exact as it gets. A test that needs it and has it not fails with what to do.

A start costs half a minute of two cores, so tests share one engine (the fixture `vllm`), and each loads the weights that it
needs: a gateway does so when it attaches to an external engine, and `SharedEngine.running` for tests that use no gateway.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.vllm_cpu import VLLM_CPU
from gateway.config import EngineSettings, ModelSettings
from gateway.engines.base import Engine
from gateway.engines.process import LOOPBACK, command, connect
from headgate.processes.child import dependent
from headgate.processes.ports import free_port
from tests.harness.waiting import until

START_S = STAND_S = 600.0
LENGTH = 32_768
"""The most tokens of prompt and response together: the tiny model samples so fast that a shorter response is over before a busy
machine has sent the pause."""
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-engine" / "bin" / "python"


def vllm_settings(log: Path) -> dict[str, Any]:
    """Return an `[engine]` table."""
    if not PYTHON.exists():
        pytest.fail("these tests need vLLM's CPU build: run `make engine`", pytrace=False)
    return {
        "launch": "vllm",
        "python": str(PYTHON),
        "args": VLLM_CPU["args"],
        "env": {**VLLM_CPU["env"], "PYTHONPATH": str(Path(__file__).parent / "vllm_plugin")},
        "log": str(log),
    }


class SharedEngine:
    """One vLLM for all tests that end none. Started at its first use, and again by the next test after one that killed it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        path: Path | None = None,
        args: Sequence[str] = (),
        transport: str = "collective",
    ) -> None:
        """`model`: a checkpoint for the start. It sets the architecture and the longest request; its weights are replaced.
        `path`: a folder of packages that it needs; `args`: more of its command line; `transport`: how versions may come."""
        self._transport = transport
        self._path = [str(path)] if path is not None else []
        self._args = [*args]
        self.starts = 0
        self._model = model
        self._log = log
        self._barrier = log.with_suffix(".barrier")
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The engine's URL; starts the engine if it does not run."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def settings(self) -> dict[str, Any]:
        """An `[engine]` table: the gateway attaches to the engine and loads its first version's weights."""
        return {"launch": "external", "url": self.url}

    @asynccontextmanager
    async def running(self, weights: Path) -> AsyncIterator[Engine]:
        """Yield the engine with these weights, an empty prefix cache and no request."""
        engine = connect("engine", self.url, "vllm")
        try:
            await engine.pause()
            await engine.load(str(weights))
            await engine.label(0)
            await engine.resume()
            yield engine
        finally:
            await engine.close()

    @contextmanager
    def barrier(self, requests: int, tokens: int) -> Iterator[Callable[[], Awaitable[None]]]:
        """Hold the engine until `requests` requests have come, and stop it when enough of them have `tokens` tokens.

        Yields what waits for that. Resuming the engine lets it continue, as after a pause that keeps requests.
        """
        draft = self._barrier.with_suffix(".draft")
        draft.write_text(f"{requests} {tokens}")
        draft.rename(self._barrier)

        async def stands_still() -> None:
            what = f"{requests} requests stand at the engine's barrier, after {tokens} tokens"
            await until(lambda: not self._barrier.exists(), what, STAND_S)

        try:
            yield stands_still
        finally:
            self._barrier.unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL; none of its connections is served when this returns."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _start(self) -> None:
        values = vllm_settings(self._log) | {"transport": self._transport}  # which it can do, and need not
        settings = EngineSettings.model_validate(values | {"args": [*values["args"], *self._args]})
        model = ModelSettings(path=self._model, max_model_len=LENGTH)
        self._port = free_port()
        argv, env = command(settings, model, "shared", str(self._model), LOOPBACK, self._port)
        env |= {
            "HEADGATE_TESTS_BARRIER": str(self._barrier),
            "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], str(ROOT), *self._path]),
        }
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(
                dependent([*argv, "--scheduler-cls", "tests.harness.vllm_scheduler.BarrierScheduler"]),
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        limit = time.monotonic() + START_S
        while not self._healthy():
            if process.poll() is not None or time.monotonic() > limit:
                self.kill()
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
                pytest.fail(f"vLLM did not start within {START_S:g} s; {self._log}:\n{tail}", pytrace=False)
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self._port}/health", timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            return False
