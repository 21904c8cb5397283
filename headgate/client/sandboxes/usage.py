"""The use of memory, CPU and processes by a process and its descendants, from `/proc`, compared with the limits.

`UsageWatch` owns one task for all watched processes, since each check reads the whole of `/proc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headgate.client.sandboxes.base import MIB, Limits

_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Process:
    """One row of a table of processes."""

    pid: int
    parent: int
    cpu_s: float
    """With the children that it has waited for."""
    memory: int
    """Resident bytes, those that it shares with others included."""


Table = Mapping[int, Process]


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that is exceeded, in words, and the reason for which the episode is left out."""

    description: str
    reason: str


def table() -> dict[int, Process]:
    """Return all processes of this machine."""
    found = {}
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGESIZE")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                cpu = sum(map(int, fields[11:15])) / ticks
                pid = int(entry.name)
                found[pid] = Process(pid, int(fields[1]), cpu, int(fields[21]) * page)
    return found


def tree(processes: Table, root: int) -> list[Process]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, next_ones = [], [root]
    while next_ones:
        pid = next_ones.pop()
        if pid in processes:
            found.append(processes[pid])
            next_ones += children.get(pid, ())
    return found


def shared_fairly(process: Process) -> Process:
    """Return a process with only its share of shared memory, which is slow to read."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return replace(process, memory=kib * 1024)
    return process


def excess(processes: list[Process], limits: Limits) -> Excess | None:
    """Return the first limit that these processes exceed together."""
    memory, cpu_s = sum(p.memory for p in processes) / MIB, sum(p.cpu_s for p in processes)
    if memory > limits.memory_mib:
        return Excess(f"{memory:.0f} MiB of memory, of {limits.memory_mib} that it may", "memory_limit")
    if cpu_s > limits.cpu_s:
        return Excess(f"{cpu_s:.1f} s of CPU time, of {limits.cpu_s} that it may", "cpu_limit")
    if len(processes) > limits.processes:
        return Excess(f"{len(processes)} processes, of {limits.processes} that it may", "process_limit")
    return None


class UsageWatch:
    """Checks the trees of watched processes five times a second."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._watched: dict[int, asyncio.Future[Excess]] = {}
        self._looking: asyncio.Task[None] | None = None

    def begin(self, root: int) -> asyncio.Future[Excess]:
        """Watch a process; the future is done once it exceeds a limit."""
        future = self._watched[root] = asyncio.get_running_loop().create_future()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="sandboxes-usage")
        return future

    def end(self, root: int) -> None:
        """Stop watching a process."""
        self._watched.pop(root).cancel()

    async def _look(self) -> None:
        try:
            while self._watched:
                found = await asyncio.to_thread(self._excesses, tuple(self._watched))
                for root, excess_of_it in found.items():
                    future = self._watched.get(root)
                    if future is not None and not future.done():
                        future.set_result(excess_of_it)
                await asyncio.sleep(_EVERY_S)
        except Exception as error:  # an agent that is not watched must not continue
            for future in self._watched.values():
                if not future.done():
                    future.set_exception(error)

    def _excesses(self, roots: Iterable[int]) -> dict[int, Excess]:
        processes, found = table(), {}
        for root in roots:
            members = tree(processes, root)
            too_much = excess(members, self._limits)
            if too_much is not None and too_much.reason == "memory_limit":
                too_much = excess([shared_fairly(process) for process in members], self._limits)
            if too_much is not None:
                found[root] = too_much
        return found
