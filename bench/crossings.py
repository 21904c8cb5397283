"""A trace of one process: which folder of the program calls which.

`python bench/crossings.py FOLDER -- MODULE ARGUMENTS` runs a program (`gateway.cli serve -c X.toml`, say) of the current folder's
checkout. SIGUSR1 begins a trace, SIGUSR2 writes it to FOLDER. A room is a folder of the program; a crossing is a call from one
room into another, whatever libraries are in between. Work of tasks and threads that were there before the trace began is left
out, unless `--all` is given. `bench.ways` uses it.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGES = ("gateway", "trainer", "scheduler", "processes")
Edge = tuple[str, str]


class Trace:
    """The crossings of one process, between two signals."""

    def __init__(self, root: Path, folder: Path, every: bool) -> None:
        """`every`: also what older tasks do."""
        self._root = f"{root}{os.sep}"
        self._folder = folder
        self._every = every
        self._on = False
        self._before: set[asyncio.Task[Any]] = set()
        self._rooms: dict[CodeType, str] = {}
        self._begins: dict[CodeType, int] = {}
        """The instruction at which a frame of this code begins; a coroutine that goes on is at a later one."""
        self._crossings: Counter[Edge] = Counter()
        self._first: dict[Edge, str] = {}

    def watch(self) -> None:
        """Looks at every call of this process from now on."""
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _begin(self, *_: Any) -> None:
        try:
            self._before = set(asyncio.all_tasks())
        except RuntimeError:
            self._before = set()
        self._crossings.clear()
        self._first.clear()
        self._on = True

    def _end(self, *_: Any) -> None:
        self._on = False
        edges = [
            {"from": a, "to": b, "calls": n, "first": self._first[a, b]}
            for (a, b), n in self._crossings.items()
        ]
        aside = self._folder / f"{os.getpid()}.tmp"
        aside.write_text(json.dumps({"argv": sys.argv, "edges": edges}, indent=1))
        aside.replace(self._folder / f"{os.getpid()}.json")

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        begins = self._begins.setdefault(code, frame.f_lasti)
        if not self._on or frame.f_lasti > begins or not (room := self._room(code)):
            return
        caller = frame.f_back
        while caller is not None and not self._room(caller.f_code):
            caller = caller.f_back
        here = self._room(caller.f_code) if caller is not None else "outside"
        if here == room or self._is_older():
            return
        self._crossings[here, room] += 1
        self._first.setdefault((here, room), code.co_qualname)

    def _is_older(self) -> bool:
        if self._every:
            return False
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return threading.current_thread() is not threading.main_thread()
        return task in self._before

    def _room(self, code: CodeType) -> str:
        found = self._rooms.get(code)
        if found is None:
            path = code.co_filename
            inside = path.removeprefix(self._root) if path.startswith(self._root) else ""
            found = inside.rpartition("/")[0] if inside.split("/")[0] in PACKAGES else ""
            self._rooms[code] = found
        return found


def main() -> None:
    """Runs the program that the arguments name."""
    own, program = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    folder = Path(own[0])
    folder.mkdir(parents=True, exist_ok=True)
    Trace(Path.cwd(), folder, "--all" in own).watch()
    # The checkout in which this was started, and not this file's own folder.
    sys.path[0] = os.getcwd()
    sys.argv = program
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
