"""The command `gateway` as a person would run it; `serve` is a process of its own, which signals reach."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from click.testing import Result
from typer.testing import CliRunner

from gateway.cli import app
from headgate.processes.child import LocalProcess
from tests.harness.forks import GatewayCommand
from tests.harness.waiting import LONG_S, until


async def gateway_command(*argv: object) -> Result:
    """Run `gateway` with these arguments, as a person would."""
    return await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, app, [str(a) for a in argv])


def write_toml(values: dict[str, Any], path: Path) -> Path:
    """Write settings, in the form for `Settings.parse`, to a file."""
    lines: list[str] = []
    _table(lines, (), values)
    path.write_text("\n".join(lines) + "\n")
    return path


def _table(lines: list[str], name: tuple[str, ...], values: dict[str, Any]) -> None:
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    if name and len(tables) < len(values):
        lines.append(f"[{'.'.join(name)}]")
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
    for key, value in tables.items():
        _table(lines, (*name, key), value)


class Served:
    """A running `gateway serve`."""

    def __init__(self, process: LocalProcess | GatewayCommand, url: str) -> None:
        self.process = process
        self.url = url

    @property
    def log(self) -> str:
        """The output so far."""
        return self.process.log.read_text() if self.process.log else ""

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the first process alone."""
        os.kill(self.process.pid, number)

    async def status(self, path: str) -> tuple[int, str]:
        """Return a response's status and its error's code; (0, "") if there is no connection."""
        async with httpx.AsyncClient(base_url=self.url, timeout=LONG_S) as http:
            try:
                response = await http.get(path)
            except httpx.TransportError:
                return 0, ""
            return response.status_code, (response.json().get("error") or {}).get("code", "")

    async def ready(self) -> None:
        """Return once calls would be served."""

        async def ready() -> bool:
            assert self.process.returncode is None, self.log
            return (await self.status("/readyz"))[0] == 200

        await until(ready, "the gateway is ready")


@asynccontextmanager
async def served(values: dict[str, Any], work: Path, *options: str) -> AsyncIterator[Served]:
    """`gateway serve`, which may not be ready yet; killed in the end if it has not ended."""
    config = write_toml(values, work / "gateway.toml")
    process = GatewayCommand("serve", "--config", str(config), *options, log=work / "gateway.log")
    try:
        yield Served(process, f"http://127.0.0.1:{values['server']['port']}")
    finally:
        await process.stop()


def command_line(pid: int) -> str:
    """Return a running process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def descendants(pid: int) -> set[int]:
    """Every process that one has started, and those that these have started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, left = set(), list(children.get(pid, ()))
    while left:
        found.add(child := left.pop())
        left += children.get(child, ())
    return found
