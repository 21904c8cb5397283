"""Real servers for benches and tests: each of its own, on a free port of the loopback, with its data in a folder of its own.

A server can be stopped as a crash would (`stop("kill")`) and started again with the same port and data. Its methods block, so
who has an event loop calls `start` and `stop` with `asyncio.to_thread`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psycopg

from examples.service.programs import check_unprivileged, find_program, has_icu
from headgate.processes.ports import free_port

Stop = Literal["kill", "immediate", "fast"]
_TIMEOUT_S = 300.0
_UNPRIVILEGED = ("postgres", "nobody")  # codespell:ignore nobody


class PostgresServer:
    """A PostgreSQL server. Make it with `postgres_server`; its databases order text as English does, if it has ICU."""

    def __init__(self, folder: Path, *, durable: bool, **options: str) -> None:
        """Prepare a server. `options`: further ones of the server, such as `shared_buffers`."""
        self._folder = folder
        self._durable = durable
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._programs = {name: find_program(name) for name in ("initdb", "postgres")}
        check_unprivileged(self._programs["postgres"])
        self._as: dict[str, Any] = _unprivileged_user() if os.geteuid() == 0 else {}
        """PostgreSQL refuses to run as root."""
        self.port = free_port()

    def initialize(self) -> None:
        """Make an empty cluster of databases."""
        if user := self._as.get("user"):
            shutil.chown(self._folder, user)
        locale = ["--encoding=UTF8", "--locale=C.UTF-8"]
        if has_icu(self._programs["initdb"]):
            locale += ["--locale-provider=icu", "--icu-locale=en-US"]
        arguments = ("--username=headgate", "--auth=trust", "--no-sync", *locale, f"--pgdata={self._data}")
        self._run(self._programs["initdb"], *arguments)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    @property
    def initialized(self) -> bool:
        """Return true if the databases exist already."""
        return (self._data / "PG_VERSION").exists()

    @property
    def running(self) -> bool:
        """Returns whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and wait until it responds."""
        assert not self.running
        options = {
            "port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "",
            "fsync": "on" if self._durable else "off", "full_page_writes": "on" if self._durable else "off", **self._options,
        }  # fmt: skip
        switches = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs["postgres"], "-D", self._data, *switches],
                **self._as, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._responds():
            if not self.running or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.02)

    def stop(self, how: Stop = "fast") -> None:
        """Stop it. `kill`: all of its processes by SIGKILL; `immediate`: it drops everything; `fast`: it ends in order."""
        if self._process is None:
            return
        if how == "kill":
            self._kill()
        else:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGQUIT if how == "immediate" else signal.SIGINT)
        self._process.wait(_TIMEOUT_S)
        self._process = None

    def pause(self) -> None:
        """Stop all of its processes: connections stay open, and none responds."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the stopped processes."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)  # first, so that one that stops starts no others
        for child in _children(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(int(child), number)

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)  # so that it starts no others now
        children = [int(child) for child in _children(self._process.pid)]
        for pid in (*children, self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _TIMEOUT_S
        while any(_lives(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.005)

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database, as `[store] url` takes it."""
        return f"postgresql://headgate@127.0.0.1:{self.port}/{database}"

    def new_database(self, like: str | None = None) -> str:
        """Make a database and return its name. It is empty, or a copy of `like`, to which there must be no connection."""
        self._databases += 1
        name = f"test_{self._databases}"
        template = f" TEMPLATE {like}" if like else ""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                self.execute(f"CREATE DATABASE {name}{template}")
            except psycopg.errors.ObjectInUse:
                # The server's process of a connection that was closed lives on for a moment
                if time.monotonic() > deadline:
                    raise
            else:
                return name

    def drop_database(self, name: str) -> None:
        """Drop a database, even if it has connections."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run one statement on a connection of its own; return its rows."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _responds(self) -> bool:
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, *command: str | Path) -> None:
        process = subprocess.run(command, **self._as, cwd=self._folder, capture_output=True, check=False)
        if process.returncode:
            raise RuntimeError(f"{command[0]}: {process.stdout.decode()} {process.stderr.decode()}")


@contextmanager
def postgres_server(*, durable: bool = False, **options: str) -> Iterator[PostgresServer]:
    """Yield a running PostgreSQL server. `durable`: it waits for its disk; otherwise a crash of the machine loses data."""
    folder = Path(tempfile.mkdtemp(prefix="headgate-postgres-"))
    try:
        server = PostgresServer(folder, durable=durable, **options)
        server.initialize()
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RedisServer:
    """A Redis server that keeps nothing on disk: stopped, it has lost everything. Make it with `redis_server`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = find_program("redis-server")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """The URL that `[bus] url` takes."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        """Returns whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, empty, and wait until it responds."""
        assert not self.running
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "dir": self._folder,
        }
        switches = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [self._program, *switches],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _TIMEOUT_S
        while self._request("PING") != "+PONG":
            if not self.running or time.monotonic() > deadline:
                raise RuntimeError(f"Redis did not start: {log.read_text()[-2000:]}")
            time.sleep(0.02)

    def stop(self, how: Literal["kill", "fast"] = "kill") -> None:
        """Stop it. `kill`: by SIGKILL; `fast`: it ends in order."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        self._process.wait(_TIMEOUT_S)
        self._process = None

    def pause(self, paused: bool) -> None:
        """Stop the process without loss of data, or let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def flush(self) -> None:
        """Delete all keys."""
        assert self._request("FLUSHALL") == "+OK"

    def _request(self, command: str) -> str:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=_TIMEOUT_S) as connection:
                connection.sendall(f"{command}\r\n".encode())
                return connection.recv(64).decode().strip()
        except ConnectionError:
            return ""


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Yield a running Redis server."""
    folder = Path(tempfile.mkdtemp(prefix="headgate-redis-"))
    try:
        server = RedisServer(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged_user() -> dict[str, Any]:
    """Return options for Popen that run a command as the machine's first unprivileged user."""
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = next(known[name] for name in _UNPRIVILEGED if name in known)
    return {"user": entry.pw_name, "group": entry.pw_gid, "extra_groups": []}


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []


def _lives(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
