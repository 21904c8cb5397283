"""Examines this machine: room on the disks that grow, and the limits of a process."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from gateway.doctor.finding import Finding
from gateway.settings import Settings
from gateway.store.connections import driver

_FREE_GIB = 5.0
_FILES = 4096
"""Each stream takes two: the client's connection and the engine's."""
_PROCESSES = 4096
"""Threads count, and an engine has hundreds."""


async def examine_disk(settings: Settings) -> list[Finding]:
    """The disks of the database and of fetched versions."""
    places = {"[weights] dir": settings.weights.dir} if settings.weights.sources else {}
    url = driver(settings.store.url)
    if url.get_backend_name() == "sqlite" and url.database:
        places["[store] url"] = Path(url.database).parent
    found = []
    for setting, place in places.items():
        there = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(there).free / 2**30
        what = f"{setting}: {free:.1f} GiB are free in {there}"
        found.append(
            Finding("ok", what)
            if free >= _FREE_GIB
            else Finding("warning", what, "free some, or set another place")
        )
    return found or [Finding("ok", "nothing here grows")]


async def examine_limits(_settings: Settings) -> list[Finding]:
    """The soft limits, which the gateway does not raise itself."""
    return [_open_files(), _processes()]


def _open_files() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"a process may have {soft:,} files open"
    if soft < _FILES:
        return Finding("warning", f"{what}; a stream takes two", "ulimit -n 65536 before the start")
    return Finding("ok", what)


def _processes() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= soft < _PROCESSES:
        what = f"this user may have {soft:,} processes and threads; an engine has hundreds"
        return Finding("warning", what, "ulimit -u unlimited before the start")
    return Finding("ok", "processes and threads are not limited tightly")
