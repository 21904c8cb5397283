"""The processes under measurement: an engine, and a gateway in front of the same engine; and the CPU time of each.

Owns the children, their files and their logs, all in one temporary folder that is gone afterwards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench.vllm_cpu import VLLM_CPU
from gateway.config.settings import Settings
from gateway.engines.process import EngineProcess
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_START_S = 180.0
EnginePython = Annotated[
    Path, typer.Option("--engine-python", help="The interpreter of vLLM's environment (`make engine`).")
]
ENGINE_PYTHON = Path(".venv-engine/bin/python")


def check_installed(engine_python: Path) -> None:
    """Raise typer.BadParameter if vLLM's environment is not there."""
    if not engine_python.exists():
        message = f"{engine_python} is not there: run `make engine`"
        raise typer.BadParameter(message, param_hint="--engine-python")


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
        """Return the CPU-seconds, user and system, of the process and of its running children."""
        return session_cpu_s(self.pid)

    def rss_mib(self) -> float:
        """Return the resident memory of the same processes."""
        return sum(int(fields[_RSS]) for _, fields in _session(self.pid)) * _PAGE / 2**20

    def pin(self, cpus: set[int]) -> None:
        """Keep every thread of the same processes, and what they start from now on, on these CPUs."""
        for pid, _ in _session(self.pid):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), cpus)


_SESSION, _USER, _SYSTEM, _RSS = 3, 11, 12, 21
"""Fields of /proc/PID/stat after the command's name."""


def session_cpu_s(session: int) -> float:
    """Return the CPU-seconds (user and system) of the running processes of a session, which its leader's process id names."""
    return sum(_cpu_s(fields) for _, fields in _session(session))


def _session(session: int) -> Iterator[tuple[int, list[str]]]:
    """Yield process id and fields of each running process of a session."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[_SESSION]) == session:
                yield int(entry.name), fields


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS


@asynccontextmanager
async def run_engine(launch: str, model: Path, work: Path, python: Path) -> AsyncIterator[Child]:
    """Yield an engine with the checkpoint `model`, started as the gateway starts it; `python` is vLLM's."""
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
async def run_mock(work: Path, *options: str) -> AsyncIterator[Child]:
    """Run `bench.engine` with these options."""
    port = free_port()
    argv = [sys.executable, "-m", "bench.engine", "--port", str(port), *options]
    async with run_server("mock", argv, port, "/health", work) as child:
        yield child


@asynccontextmanager
async def run_gateway(engine: Child, model: Path, work: Path, **options: Any) -> AsyncIterator[Child]:
    """Run `gateway serve` in front of a running engine, recording into SQLite as it does by default."""
    tables = f"[engine]\nlaunch = 'external'\nurl = '{engine.url}'\n"
    async with serve_gateway(model, tables, work, **options) as child:
        yield child


@asynccontextmanager
async def serve_gateway(
    model: Path,
    tables: str,
    work: Path,
    *,
    max_model_len: int = 2048,
    module: str = "gateway.cli",
    router_replay: bool = False,
) -> AsyncIterator[Child]:
    """Run `gateway serve`, recording into SQLite as it does by default; `tables` are further tables of its file.

    `module` runs in place of the gateway's own command, with the same arguments.
    """
    port = free_port()
    config = work / f"gateway-{port}.toml"
    config.write_text(
        f"[server]\nport = {port}\n"
        f"[models.bench]\npath = '{model}'\nmax_model_len = {max_model_len}\n"
        f"router_replay = {str(router_replay).lower()}\n"
        f"{tables}"
        f"[store]\nurl = 'sqlite:///{work}/gateway-{port}.db'\n"
        f"[control]\nrecording = '{work}/control-{port}.jsonl'\n"
    )
    argv = [sys.executable, "-m", module, "serve", "--config", str(config)]
    async with run_server("gateway", argv, port, "/admin/v1/status", work) as child:
        yield child


@asynccontextmanager
async def run_server(
    name: str,
    argv: Sequence[str],
    port: int,
    path: str,
    work: Path,
    env: Mapping[str, str] | None = None,
    *,
    start_s: float = _START_S,
) -> AsyncIterator[Child]:
    """Start a server, and yield it once it serves a GET of `path` on `port`. Raise ChildDied or TimeoutError."""
    process = await LocalProcess.start(name, argv, work / f"{name}-{port}.log", env)
    child = Child(process.pid, port)
    try:
        async with httpx.AsyncClient(base_url=child.url) as http:
            await process.ready(lambda: _responds(http, path), start_s)
        yield child
    finally:
        await process.stop()


async def _responds(http: httpx.AsyncClient, path: str) -> bool:
    try:
        return (await http.get(path, timeout=5.0)).is_success
    except httpx.HTTPError:
        return False


def _port_of(pid: int) -> int:
    """Return the value of `--port` on a process's command line."""
    argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return int(argv[argv.index("--port") + 1])
