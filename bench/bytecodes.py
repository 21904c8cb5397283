"""Counts the Python instructions of the gateway's event loop for one short chat, with recording on.

Seconds of CPU depend on what else the machine does; instructions do not, so two builds can be compared while the machine is busy.
What C does (JSON, tokenizing, SQLite, numpy) is not counted, nor are other threads. The same file serves as the gateway's command
in the measured process: `count_calls` begins and ends by signals.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import typer

from bench.load import Connection, RequestFailed, connect
from bench.model import save_model
from bench.processes import run_mock, serve_gateway
from bench.report import finish, machine
from bench.targets import GatewayTarget, Prompts

_OUT = "HEADGATE_BYTECODES"
"""The environment variable of the measured process with the file for its counts."""
_BEGIN, _END = signal.SIGUSR1, signal.SIGUSR2
_WARM_UP = 600
_TOKENS = 8
_PUT_OFF_S = 3600.0
"""The period of what is done once a second, such as the sweep of open episodes: tracing makes a run thirty times slower, which
would count it that often."""
_PACKAGES = ("gateway", "headgate", "scheduler", "trainer", "bench")


class Tracer:
    """Counts instructions and calls of each function of the thread that installed it."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._instructions: Counter[CodeType] = Counter()
        self._calls: Counter[CodeType] = Counter()

    def install(self) -> None:
        """Begin and end by signals."""
        signal.signal(_BEGIN, lambda *_: sys.settrace(self._on_call))
        signal.signal(_END, lambda *_: self._end())

    def _on_call(self, frame: FrameType, _event: str, _value: Any) -> Any:
        self._calls[frame.f_code] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, _value: Any) -> Any:
        if event == "opcode":
            self._instructions[frame.f_code] += 1
        return self._on_event

    def _end(self) -> None:
        sys.settrace(None)
        rows = [(_name(code), self._instructions[code], calls) for code, calls in self._calls.items()]
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(rows))
        part.rename(self._out)


def _name(code: CodeType) -> str:
    """Return the file, from its package on, and the function."""
    parts = Path(code.co_filename).parts
    first = max((i for i, part in enumerate(parts) if part in (*_PACKAGES, "site-packages")), default=-2)
    return f"{'/'.join(parts[first:])}:{code.co_qualname}"


def main(
    requests: Annotated[int, typer.Option(min=1, help="Chats of 8 tokens that are counted.")] = 640,
    connections: Annotated[int, typer.Option(min=1, help="Chats at a time.")] = 16,
    than: Annotated[
        Path | None, typer.Option(help="The --functions file of another build, to compare with.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Functions to print.")] = 30,
    functions: Annotated[
        Path, typer.Option(help="Where the instructions and calls of each function go, as JSON.")
    ] = Path("runs/bench/bytecodes-functions.json"),
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path(
        "runs/bench/bytecodes.json"
    ),
) -> None:
    """Count the Python instructions that the gateway's event loop executes for a chat of 8 tokens, before a mock engine.

    The last line has `instructions` and `calls` for one chat; with --than also the ratio of the instructions. Work that is
    done once a second, such as the sweep of open episodes, is put off.

    Example: python -m bench.bytecodes --than before.json
    """
    import uvloop

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        counted = uvloop.run(_measure(Path(folder), requests, connections))
    found = {
        name: [instructions / requests, calls / requests] for name, (instructions, calls) in counted.items()
    }
    before = json.loads(than.read_text()) if than is not None else {}
    _show(found, before, rows)
    functions.parent.mkdir(parents=True, exist_ok=True)
    functions.write_text(json.dumps(found))
    total = sum(instructions for instructions, _ in found.values())
    report = {
        "bench": "bytecodes",
        "machine": machine(),
        "seconds": round(time.monotonic() - started, 1),
        "calls": round(sum(calls for _, calls in found.values()), 1),
        "instructions": round(total, 1),
    }
    if before:
        report["ratio"] = round(total / sum(instructions for instructions, _ in before.values()), 3)
    finish(report, out)


async def _measure(work: Path, requests: int, connections: int) -> dict[str, tuple[int, int]]:
    save_model(work / "model")
    prompts = Prompts.load(work / "model")
    os.environ[_OUT] = str(work / "counts.json")
    async with run_mock(work) as engine:
        tables = f"[engine]\nlaunch = 'external'\nurl = '{engine.url}'\n"
        async with serve_gateway(work / "model", tables, work, module="bench.bytecodes") as gateway:
            target = await GatewayTarget.open(gateway.port, prompts)
            opened = [await connect(gateway.port) for _ in range(connections)]
            await _chat(target, opened, _WARM_UP)
            os.kill(gateway.pid, _BEGIN)
            await _chat(target, opened, requests)
            os.kill(gateway.pid, _END)
            await _chat(target, opened, 1)  # the handler has run before a later request is read
            return _read(work / "counts.json")


async def _chat(target: GatewayTarget, opened: list[Connection], requests: int) -> None:
    left = iter(range(requests))

    async def on_one(stream: int, connection: Connection) -> None:
        for _ in left:
            status, body, *_times = await connection.post(target.request(stream, _TOKENS, False))
            if status != 200:
                raise RequestFailed(f"{status}: {body[:200].decode(errors='replace')}")

    async with asyncio.TaskGroup() as group:
        for stream, connection in enumerate(opened):
            group.create_task(on_one(stream, connection))


def _read(path: Path) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for name, instructions, calls in json.loads(path.read_text()):
        before = found.get(name, (0, 0))
        found[name] = (before[0] + instructions, before[1] + calls)
    return found


def _show(functions: dict[str, list[float]], before: dict[str, list[float]], rows: int) -> None:
    """Print the functions with most instructions, or those whose number changed most."""
    changes = {
        name: functions.get(name, [0.0, 0.0])[0] - before.get(name, [0.0, 0.0])[0]
        for name in functions | before
    }
    for name in sorted(changes, key=lambda name: -abs(changes[name]))[:rows]:
        instructions, calls = functions.get(name, [0.0, 0.0])
        change = f"{changes[name]:+9.1f} " if before else ""
        print(f"{change}{instructions:9.1f} instructions {calls:7.2f} calls  {name}")


if __name__ == "__main__":
    if counts := os.environ.get(_OUT):
        from gateway import coordinator
        from gateway.cli import app

        coordinator.TEND_EVERY_S = _PUT_OFF_S
        Tracer(Path(counts)).install()
        app()
    else:
        typer.run(main)
