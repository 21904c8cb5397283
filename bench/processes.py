"""The processes under measurement: an engine, and a gateway in front of the same engine; and the CPU time of each.

Owns the children, their files and their logs, all in one temporary folder that is gone afterwards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from gateway.engines.process import EngineProcess
from gateway.settings import Settings
from scheduler.cluster.local import LocalProcess, free_port

_TICKS = os.sysconf("SC_CLK_TCK")
_START_S = 180.0
VLLM_CPU: dict[str, Any] = {
    "args": ["--enforce-eager", "--dtype", "float32", "--block-size", "32"],
    "env": {
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    },
}
"""vLLM on the CPU, as small as it gets: what is measured is the gateway, not the model."""


class Child:
    """A process that listens on a loopback port."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port

    @property
    def url(self) -> str:
        """Its root URL."""
        return f"http://127.0.0.1:{self.port}"

    def cpu_s(self) -> float:
        """CPU-seconds, user and system, of the process and of what it started that still runs."""
        return session_cpu_s(self.pid)


def session_cpu_s(session: int) -> float:
    """CPU-seconds (user and system) of the running processes of a session, which its leader's process id names."""
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


@asynccontextmanager
async def run_engine(launch: str, model: Path, work: Path, python: Path) -> AsyncIterator[Child]:
    """An engine with the checkpoint `model`, started as the gateway starts it; `python` is vLLM's interpreter."""
    engine: dict[str, Any] = {"launch": launch, "log": str(work / f"{launch}.log"), "start_s": _START_S}
    if launch == "vllm":
        engine |= {"python": str(python), **VLLM_CPU}
    settings = Settings.parse({"models": {"bench": {"path": str(model)}}, "engine": engine})
    process = await EngineProcess.start(
        launch, settings.engine, settings.model, settings.model_name, str(model)
    )
    try:
        yield Child(process.process.pid, _port_of(process.process.pid))
    finally:
        await process.stop()


@asynccontextmanager
async def run_gateway(engine: Child, model: Path, work: Path) -> AsyncIterator[Child]:
    """`gateway serve` in front of a running engine, recording into SQLite as it does by default."""
    tables = f"[engine]\nlaunch = 'external'\nurl = '{engine.url}'\n"
    async with serve_gateway(model, tables, work) as child:
        yield child


@asynccontextmanager
async def serve_gateway(model: Path, tables: str, work: Path) -> AsyncIterator[Child]:
    """`gateway serve`, recording into SQLite as it does by default; `tables` are further tables of its file."""
    port = free_port()
    config = work / f"gateway-{port}.toml"
    config.write_text(
        f"[server]\nport = {port}\n"
        f"[models.bench]\npath = '{model}'\n"
        f"{tables}"
        f"[store]\nurl = 'sqlite+aiosqlite:///{work}/gateway-{port}.db'\n"
    )
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    process = await LocalProcess.start("gateway", argv, work / f"gateway-{port}.log")
    child = Child(process.pid, port)
    try:
        async with httpx.AsyncClient(base_url=child.url) as http:
            await process.ready(lambda: _answers(http), _START_S)
        yield child
    finally:
        await process.stop()


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/admin/v1/status", timeout=5.0)).is_success
    except httpx.HTTPError:
        return False


def _port_of(pid: int) -> int:
    """The value of `--port` on a process's command line."""
    argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return int(argv[argv.index("--port") + 1])
