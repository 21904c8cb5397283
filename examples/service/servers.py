"""PostgreSQL, Redis and Prometheus as child processes on the loopback: what `make up` puts behind the gateway.

PostgreSQL's data stays in its folder from one start to the next; Redis keeps nothing. Both ask for a password, as many people may
have an account on one machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from examples.service.programs import NotInstalled, check_unprivileged, find_program
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port

_START_S = 60.0
_UNPRIVILEGED = ("postgres", "nobody")  # codespell:ignore nobody
_SCRAPE = {"scrape_interval": "5s"}


async def start_postgres(folder: Path, password: str) -> tuple[LocalProcess, str]:
    """Start PostgreSQL with its data in `folder`/postgres; return its process and the URL of its database."""
    data, port = folder / "postgres" / "data", free_port()
    # its own folder, which it owns: it refuses to run as root
    data.parent.mkdir(parents=True, exist_ok=True)
    as_another = _as_another(data.parent)
    if not (data / "PG_VERSION").exists():
        await _initialize(folder, data, password, as_another)
    options = {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": ""}
    switches = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
    argv = [*as_another, str(find_program("postgres")), "-D", str(data), *switches]
    url = f"postgresql://headgate:{password}@127.0.0.1:{port}/postgres"
    return await _start("postgres", argv, folder, lambda: _answers(url)), url


async def _start(
    name: str, argv: list[str], folder: Path, check: Callable[[], Awaitable[bool]]
) -> LocalProcess:
    """Return a process once it is ready; stop one that does not become so, or that is not waited for any more."""
    process = await LocalProcess.start(name, argv, folder / f"{name}.log")
    try:
        await process.ready(check, _START_S)
    except BaseException:
        await process.stop()
        raise
    return process


async def _initialize(folder: Path, data: Path, password: str, as_another: list[str]) -> None:
    secret = data.parent / "password"
    secret.touch(mode=0o600)
    secret.write_text(password)
    if as_another:
        shutil.chown(secret, _unprivileged_user())
    arguments = ["--username=headgate", "--auth=scram-sha-256", f"--pwfile={secret}", "--encoding=UTF8"]
    argv = [*as_another, str(find_program("initdb")), *arguments, f"--pgdata={data}"]
    process = await LocalProcess.start("initdb", argv, folder / "postgres.log")
    try:
        status = await process.wait()
    finally:
        await process.stop()
        secret.unlink()
    if status:
        raise NotInstalled(f"PostgreSQL could not be set up: {process.exit_report()}")


async def start_redis(folder: Path, password: str) -> tuple[LocalProcess, str]:
    """Start Redis without persistence; return its process and URL."""
    port = free_port()
    config = folder / "redis.conf"
    config.touch(mode=0o600)
    config.write_text(
        f'bind 127.0.0.1\nport {port}\nsave ""\nappendonly no\nrequirepass {password}\ndir {folder.resolve()}\n'
    )
    argv = [str(find_program("redis-server")), str(config)]
    process = await _start("redis", argv, folder, lambda: _listens(port))
    return process, f"redis://:{password}@127.0.0.1:{port}/0"


async def start_prometheus(folder: Path, targets: Path) -> tuple[LocalProcess, str] | None:
    """Start Prometheus, which finds gateway processes in `targets`; return None if it is not installed."""
    found = shutil.which("prometheus")
    if found is None:
        return None
    port = free_port()
    job = {"job_name": "headgate", "file_sd_configs": [{"files": [str(targets.resolve())]}]}
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": _SCRAPE, "scrape_configs": [job]}))  # JSON is YAML
    argv = [found, f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}"]
    argv.append(f"--web.listen-address=127.0.0.1:{port}")
    process = await _start("prometheus", argv, folder, lambda: _listens(port))
    return process, f"http://127.0.0.1:{port}"


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _answers(url: str) -> bool:
    import psycopg

    try:
        await (await psycopg.AsyncConnection.connect(url)).close()
    except psycopg.OperationalError:
        return False
    return True


def _unprivileged_user() -> str:
    known = {user.pw_name for user in pwd.getpwall()}
    return next(name for name in _UNPRIVILEGED if name in known)


def _as_another(folder: Path) -> list[str]:
    """Return the beginning of a command line that runs as an unprivileged user and still ends with its parent."""
    if os.geteuid() != 0:
        return []
    check_unprivileged(find_program("postgres"))
    name = _unprivileged_user()
    shutil.chown(folder, name)
    setpriv = str(find_program("setpriv"))
    return [
        setpriv,
        f"--reuid={name}",
        f"--regid={pwd.getpwnam(name).pw_gid}",
        "--clear-groups",
        "--pdeathsig=TERM",
    ]
