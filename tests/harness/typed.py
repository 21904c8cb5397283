"""The command `gateway` for shells: each that is typed is forked from a process that has imported everything.

A shell finds a small program of that name in a folder of PATH. It sends over a socket what was typed and where, a process forked
for that runs it, with its files and its environment, and it ends with the same status.
"""

from __future__ import annotations

import importlib
import json
import os
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.forks import LIMIT_S, forks, keep_what_is_loaded

_PROGRAM = """#!{python} -ISE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as there:
    there.connect({socket!r})
    there.sendall(json.dumps([os.getpid(), sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    there.shutdown(socket.SHUT_WR)
    status = there.recv(16)
sys.exit(int(status) if status else "the command was never run")
"""


@contextmanager
def typed(folder: Path) -> Iterator[Path]:
    """Yield a folder for PATH that has `gateway`. `folder`: an empty one, with a short path: a socket lies in it."""
    place = str(folder / "socket")
    program = folder / "gateway"
    program.write_text(_PROGRAM.format(python=sys.executable, socket=place))
    program.chmod(0o755)
    with socketserver.ThreadingUnixStreamServer(place, _Typed) as server:
        thread = threading.Thread(target=server.serve_forever, name="typed commands", daemon=True)
        thread.start()
        try:
            yield folder
        finally:
            server.shutdown()
            thread.join()


class _Typed(socketserver.StreamRequestHandler):
    """One command, from what was typed to its exit status."""

    def handle(self) -> None:
        arguments = json.load(self.rfile)
        process = forks().Process(target=_run, args=arguments, daemon=False)
        process.start()
        process.join(LIMIT_S)
        process.kill()
        process.join()
        self.wfile.write(str(process.exitcode).encode())


def _run(pid: int, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    keep_what_is_loaded()
    for number in (1, 2):
        there = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_APPEND)
        os.dup2(there, number)
    out: Any = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stdout = sys.stderr = out
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["gateway", *arguments]
    importlib.import_module("gateway.cli").main()
