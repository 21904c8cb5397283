"""Examines this machine and what the gateway connects to: addresses, disks, limits, the database, the bus, `[telemetry]`."""

from __future__ import annotations

import asyncio
import errno
import resource
import shutil
import socket
import time
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryFile

from gateway.bus.opening import open_bus
from gateway.config import StoreSettings
from gateway.config.settings import ConfigError, Settings
from gateway.doctor import Finding
from gateway.render.tool_alarm import WORDS
from gateway.store import clock, turns
from gateway.store.connections import connect, driver, without_password
from gateway.store.holder import REMEDY, holder_of, in_use
from gateway.store.schema import check_form
from gateway.telemetry.opening import collector_responds
from headgate.errors import Unavailable
from headgate.http import ERRORS, Session
from headgate.processes.ports import url_of

_FREE_GIB = 5.0
_RESPONSE_S = 5.0
_FILES = 4096
"""Each stream needs two: the client's connection and the engine's."""
_PROCESSES = 4096
"""Threads count, and an engine has hundreds."""


async def examine_disk(settings: Settings) -> list[Finding]:
    """Find disks of the database and of fetched versions that are nearly full."""
    places = {"[weights] dir": settings.weights.dir} if settings.weights.sources else {}
    url = driver(settings.store.url)
    if url.get_backend_name() == "sqlite" and url.database:
        places["[store] url"] = Path(url.database).parent
    found = []
    for setting, place in places.items():
        existing = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(existing).free / 2**30
        what = f"{setting}: {free:.1f} GiB are free in {existing}"
        found.append(
            Finding("ok", what)
            if free >= _FREE_GIB
            else Finding("warning", what, "free some, or set another place")
        )
    return found or [Finding("ok", "nothing here grows")]


def writable(place: Path, *, file: bool = False) -> bool:
    """Return whether this user can write to a file, or make one in a folder, by trying it: root's rights differ."""
    try:
        if file:
            with place.open("ab"):
                return True
        with TemporaryFile(dir=place):
            return True
    except OSError:
        return False


async def examine_address(settings: Settings) -> list[Finding]:
    """Examine whether the gateway's addresses are free, or a gateway has them already."""
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
    if await gateway_responds(host, port):
        return Finding("ok", f"{where}: a gateway responds there")
    what = f"{where} is taken by another program"
    return Finding("problem", what, f"end what listens there, or set another {setting}")


async def gateway_responds(host: str, port: int) -> bool:
    """Return whether a gateway responds at an address."""
    try:
        async with (
            Session(total_s=_RESPONSE_S) as http,
            http.request("GET", f"{url_of(host, port)}/healthz") as response,
        ):
            return response.status == HTTPStatus.OK and "status" in await response.json()
    except (*ERRORS, ValueError):
        return False


async def examine_limits(_settings: Settings) -> list[Finding]:
    """Examine the soft limits, which the gateway does not raise itself."""
    return [_open_files(), _processes()]


def _open_files() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"a process may have {soft:,} files open"
    if soft < _FILES:
        return Finding("warning", f"{what}; a stream needs two", "ulimit -n 65536 before the start")
    return Finding("ok", what)


def _processes() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= soft < _PROCESSES:
        what = f"this user may have {soft:,} processes and threads; an engine has hundreds"
        return Finding("warning", what, "ulimit -u unlimited before the start")
    return Finding("ok", "processes and threads are not limited tightly")


# The database and the bus

_SKEW_S = 1.0
_DAY_S = 86_400.0


async def examine_database(settings: Settings) -> list[Finding]:
    """Examine which process serves the database, the revision of its tables, and its clock."""
    process = holder_of(settings.store.url)
    found = await asyncio.to_thread(_examine_database, settings.store)
    if not process:
        return found
    server, what = settings.server, in_use(without_password(settings.store.url), process)
    if await gateway_responds(server.host, server.port):
        return [*found, Finding("ok", f"{what}; a gateway responds at [server] port, too")]
    return [*found, Finding("problem", what, REMEDY)]


def _examine_database(store: StoreSettings) -> list[Finding]:
    url, shown = driver(store.url), without_password(store.url)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
        return [_unmade(shown, Path(str(url.database)).absolute().parent)]
    if url.get_backend_name() == "sqlite" and not writable(Path(str(url.database)), file=True):
        what = f"{shown}: this user cannot write to it"
        return [Finding("problem", what, "run as its owner, or set another [store] url")]
    try:
        check_form(store)
    except ConfigError as error:
        fix = "run `gateway migrate`, or start the gateway on it once; or correct [store] url"
        return [Finding("problem", str(error), fix)]
    found = [Finding("ok", f"{shown}: the tables have this build's form")]
    engine = connect(store.url, 1)
    try:
        with engine.connect() as connection:
            before = time.time()
            theirs = clock.now(connection)
            skew = min(theirs - before, 0.0) + max(theirs - time.time(), 0.0)  # none while the response took
            faulty = turns.tool_faults_since(connection, time.time() - _DAY_S)
    finally:
        engine.dispose()
    found += [
        Finding(
            "warning",
            f"{count} replies of the last day: {WORDS[fault]}",
            "gateway episodes why EPISODE shows which",
        )
        for fault, count in faulty.most_common()
    ]
    if abs(skew) > _SKEW_S:
        what = f"the database's clock is {skew:+.1f} s from this machine's"
        found.append(Finding("warning", what, "synchronize both machines' clocks (NTP)"))
    return found


def _unmade(shown: str, folder: Path) -> Finding:
    """Examine whether a database can be made in a folder; neither may exist."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if existing.is_dir() and writable(existing):
        return Finding("ok", f"{shown}: there is no database yet; the first start makes it")
    what = f"{shown}: there is no database, and none can be made: {existing} is not a folder that this user can write to"
    return Finding("problem", what, "set [store] url to a folder that the gateway's user can write to")


async def examine_bus(settings: Settings) -> list[Finding]:
    """Read a key that does not exist."""
    scheme = settings.bus.url.partition("://")[0]
    if scheme == "memory":
        return [Finding("ok", "in memory: one gateway process needs no Redis")]
    bus = open_bus(settings.bus)
    try:
        await bus.get("doctor")
    except Unavailable as error:
        return [Finding("problem", f"[bus] url: {error}", "start Redis, or correct the URL and its password")]
    finally:
        await bus.close()
    return [Finding("ok", "Redis responds")]


# Spans


async def examine_collector(settings: Settings) -> list[Finding]:
    """Send the collector an empty list of spans."""
    endpoint = settings.telemetry.endpoint
    if endpoint is None:
        return [Finding("ok", "off: [telemetry] endpoint turns it on")]
    try:
        responds = await collector_responds(settings.telemetry)
    except ConfigError as error:
        return [Finding("problem", str(error), "install the extra, or leave [telemetry] endpoint out")]
    if responds:
        return [Finding("ok", f"the collector at {endpoint} accepts spans")]
    what = f"[telemetry] endpoint: {endpoint} accepts no spans"
    return [
        Finding(
            "warning", what, "start a collector there with OTLP over HTTP, or correct the URL and its key"
        )
    ]
