"""Examines this machine: its addresses, room on the disks that grow, and the limits of a process."""

from __future__ import annotations

import errno
import resource
import shutil
import socket
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryFile

import aiohttp

from gateway.doctor.finding import Finding
from gateway.settings import Settings
from gateway.store.connections import driver
from processes.ports import url_of

_FREE_GIB = 5.0
_ANSWER_S = 5.0
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


def writable(place: Path, *, file: bool = False) -> bool:
    """Return whether this user can write to a file, or make one in a folder: tried, for rights alone do not tell."""
    try:
        if file:
            with place.open("ab"):
                return True
        with TemporaryFile(dir=place):
            return True
    except OSError:
        return False


async def examine_address(settings: Settings) -> list[Finding]:
    """Look whether the gateway's addresses are free, or a gateway has them already."""
    server, admin = settings.server, settings.admin
    ports = {"[server] port": (server.host, server.port)}
    if admin.port is not None:
        ports["[admin] port"] = (admin.host or server.host, admin.port)
    return [await _examine_port(setting, *place) for setting, place in ports.items()]


async def _examine_port(setting: str, host: str, port: int) -> Finding:
    where = f"{setting}: {host}:{port}"
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return Finding("ok", f"{where} is free")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Finding(
                "problem", f"{where}: {error.strerror or error}", "name an address of this machine"
            )
    if await gateway_answers(host, port):
        return Finding("ok", f"{where}: a gateway answers there")
    what = f"{where} is taken by another program"
    return Finding("problem", what, f"end what listens there, or set another {setting}")


async def gateway_answers(host: str, port: int) -> bool:
    """Return whether a gateway answers at an address."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(f"{url_of(host, port)}/healthz", allow_redirects=False) as answer,
        ):
            return answer.status == HTTPStatus.OK and "status" in await answer.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False


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
