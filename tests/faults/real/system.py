"""The system under test, as processes on one machine, and the links between them.

    agents, trainer -> front -> gateway-0, gateway-1
    gateway-i -> postgres-i -> PostgreSQL        gateway-i -> redis-i -> Redis
    gateways -> engine-j -> engine j             the other gateways -> peer-i -> gateway-i

Every named arrow is a link that can be reset, cut and slowed. Owns all of it from start to end, and reads the database by SQL of
its own, never through a link.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import orjson
import psycopg

from headgate.processes.ports import free_port
from tests.faults.evidence import Journal
from tests.faults.real import processes
from tests.faults.real.plan import Plan
from tests.faults.real.processes import Process
from tests.faults.real.proxy import Link
from tests.faults.weights import BLOCK, VERSIONS, save_sources
from tests.harness.servers import PostgresServer, postgres_server
from tests.harness.transports import Way, is_served, way_of

ADMIN_KEY = "admin-of-the-crash-test"
_CLUSTER_KEY = "cluster-of-the-crash-test"
_START_S = {"fake": 180.0, "vllm": 300.0}
_STORE_WAIT_S = 20.0
"""Longer than a starting gateway waits for its store."""


class System:
    """All processes and links."""

    def __init__(self, plan: Plan, folder: Path, log: Callable[[str], None]) -> None:
        self.plan = plan
        self.folder = folder
        self.log = log
        self.evidence = folder / "evidence"
        self.gateways: list[Process] = []
        self.engines: list[Process] = []
        self.links: list[Link] = []
        self.exits: list[tuple[float, str, int]] = []
        """Processes that exited and were not killed: (when, which, code)."""
        self.started = False
        self.trainer: Process
        self.agents: Process
        self.redis: Process | None = None
        self.server: Process | None = None
        """The trainer's server of versions, if the transport has one."""
        self._way = Way()
        self.front: Link
        self._postgres: PostgresServer | None = None
        self._postgres_down = False
        self._postgres_up_since = 0.0
        self._sources: list[Path] = []
        self._gateway_ports: list[int] = []
        self._ports = {"redis": free_port()}
        self._http = httpx.AsyncClient(timeout=5.0)

    # Its life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[System]:
        """Start everything, and stop it afterwards."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._http.aclose)
            self._sources = await asyncio.to_thread(
                save_sources, self.folder / "sources", self.plan.transport
            )
            if self.plan.store == "postgres":
                self._postgres = await asyncio.to_thread(stack.enter_context, postgres_server())
                self._postgres.execute("CREATE DATABASE chaos")
            stack.push_async_callback(self._end)
            await self._start()
            self.started = True
            yield self

    async def _start(self) -> None:
        plan = self.plan
        if plan.redis:
            self.redis = processes.redis(self._ports["redis"], self.folder / "redis")
            await self._started(self.redis)
        if is_served(plan.transport):
            await self._serve_versions()
        else:
            self._way = way_of(plan.transport, self.folder, "")
        urls = []
        for number, kind in enumerate(plan.engines):
            port, name = free_port(), f"engine-{number}"
            logs, first = self.evidence / "engines", self._sources[0]
            self.engines.append(
                processes.fake_engine(number, name, port, first, logs, plan.delay_s)
                if kind == "fake"
                else processes.vllm_engine(name, port, first, self.folder / "logs")
            )
            await self._started(self.engines[-1])
            urls.append((await self._link(name, [port])).url)
            await self.until(partial(self._responds, f"http://127.0.0.1:{port}/health"), name, _START_S[kind])
        self._gateway_ports = ports = [free_port() for _ in range(plan.gateways)]
        self.front = await self._link("front", ports)
        for number, port in enumerate(ports):
            values = await self._settings(number, port, urls)
            child = processes.gateway(f"gateway-{number}", values, self.folder / "gateways", plan.gateway)
            self.gateways.append(child)
            await self._started(child)
            await self.until(partial(self._responds, f"http://127.0.0.1:{port}/readyz"), child.name, 120.0)
        self._write_plan()
        logs, plan_file = self.folder / "logs", self._plan_file
        self.trainer = processes.python("trainer", "tests.faults.real.trainer", plan_file, logs)
        self.agents = processes.python("agents", "tests.faults.real.agents", plan_file, logs)
        await self._started(self.trainer)
        await self._started(self.agents)

    async def _serve_versions(self) -> None:
        port, versions = free_port(), self.folder / "weights"
        versions.mkdir(parents=True, exist_ok=True)
        self.server = processes.server_of_versions(self.plan.transport, port, versions, self.folder / "logs")
        await self._started(self.server)
        link = await self._link("server", [port])
        await self.until(partial(self._responds, f"http://127.0.0.1:{port}/versions"), "server", 180.0)
        self._way = way_of(self.plan.transport, self.folder, link.url)

    async def _started(self, process: Process) -> None:
        process.on_exit, process.forked = self._exited, self.plan.forked
        await process.start()

    def _exited(self, name: str, code: int) -> None:
        if code == 1 and (self._postgres_down or time.time() - self._postgres_up_since < _STORE_WAIT_S):
            return  # a gateway that starts without its store exits, and its supervisor starts it again
        self.exits.append((time.time(), name, code))
        self.log(f"{name} exited by itself with {code}")

    async def _link(self, name: str, targets: Sequence[int], host: str = "127.0.0.1") -> Link:
        link = Link(name, free_port(), targets, host)
        await link.start()
        self.links.append(link)
        return link

    async def _end(self) -> None:
        for group in (["agents", "trainer"], ["gateway"], ["engine", "redis", "server"]):
            some = [p for p in self.all if any(p.name.startswith(name) for name in group)]
            await asyncio.gather(*(p.end(0) for p in some))
        for link in self.links:
            await link.stop()

    @property
    def all(self) -> list[Process]:
        """Return every process."""
        rest = [getattr(self, name, None) for name in ("redis", "server", "trainer", "agents")]
        return [*self.gateways, *self.engines, *(p for p in rest if p is not None)]

    # Configuration

    async def _settings(self, number: int, port: int, engines: list[str]) -> dict[str, Any]:
        plan, folder = self.plan, self.folder / "gateways"
        values: dict[str, Any] = {
            "server": {"port": port, "public_url": self.front.url},
            "admin": {"key": ADMIN_KEY},
            "models": {"demo": {"path": str(self._sources[0])}},
            "engine": {
                "launch": "external", "urls": engines, "health_s": 1.0, "stall_s": 15.0,
                "start_s": 120.0, "max_restarts": 100,
                **self._way.engine,
            },
            "weights": self._way.weights | ({"transfer_s": 10.0} if self._way.weights else {}),
            "store": {"url": f"sqlite:///{folder}/gateway.db"},
            "episodes": {"idle_s": 30.0, "total_s": 300.0},
            "calls": {"grace_s": 8.0},
            "staleness": {"eta": plan.eta, "batch": plan.batch, "min_members": plan.group_size},
            "update": {"mode": "keep" if plan.seed % 2 else "abort"},
            "feed": {"lease_s": 15.0},
            "control": {"recording": str(folder / f"control-{number}.jsonl")},
        }  # fmt: skip
        if self._postgres is not None:
            link = await self._link(f"postgres-{number}", [self._postgres.port])
            values["store"]["url"] = f"postgresql://headgate@127.0.0.1:{link.port}/chaos"
        if plan.redis:
            link = await self._link(f"redis-{number}", [self._ports["redis"]])
            values["bus"] = {"url": f"redis://127.0.0.1:{link.port}/0"}
        if plan.gateways > 1:
            # A gateway listens at the port of its own [cluster] url, so the link has an address of its own.
            link = await self._link(f"peer-{number}", [port], "127.0.0.2")
            values["cluster"] = {"url": link.url, "key": _CLUSTER_KEY, "lease_s": plan.lease_s}
        return values

    @property
    def _plan_file(self) -> Path:
        return self.evidence / "plan.json"

    def _write_plan(self) -> None:
        """Write the file that trainer, agents and checker read."""
        values = {
            **asdict(self.plan), "server": self._way.url, "url": self.front.url, "admin_key": ADMIN_KEY, "model": "demo",
            "evidence": str(self.evidence), "trainer": str(self.evidence / "trainer"), "weights": str(self.folder / "weights"),
            "sources": str(self.folder / "sources"), "block": BLOCK, "blocks": VERSIONS,
            "unlogged_engines": [f"engine-{i}" for i, kind in enumerate(self.plan.engines) if kind != "fake"],
        }  # fmt: skip
        self.evidence.mkdir(parents=True, exist_ok=True)
        self._plan_file.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))

    # For faults

    @property
    def inner_links(self) -> list[Link]:
        """Return all links but the agents'."""
        return [link for link in self.links if link is not self.front]

    @property
    def database(self) -> str:
        """Return the URL of the database, past all links."""
        if self._postgres is not None:
            return self._postgres.url("chaos")
        return f"sqlite:///{self.folder}/gateways/gateway.db"

    async def coordinator(self) -> Process:
        """Return the gateway process that is the coordinator, or was the last one."""
        rows = await self._read("SELECT url FROM coordinator") if self.plan.gateways > 1 else []
        ports = [link.port for link in self.links if link.name.startswith("peer-")]
        for number, port in enumerate(ports):
            if rows and str(rows[0][0]).endswith(f":{port}"):
                return self.gateways[number]
        return self.gateways[0]

    async def ready_again(self, gateway: Process, patience_s: float) -> bool:
        """Return whether a gateway serves calls within that time."""
        port = self._gateway_ports[self.gateways.index(gateway)]
        try:
            await self.until(
                partial(self._responds, f"http://127.0.0.1:{port}/readyz"), gateway.name, patience_s
            )
        except TimeoutError:
            return False
        return True

    async def updating(self, patience_s: float) -> int | None:
        """Return the version of a running update, once there is one."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if rows := await self._read("SELECT version FROM versions WHERE state = 'updating'"):
                return int(rows[0][0])
            await asyncio.sleep(0.05)
        return None

    async def flush_redis(self) -> bool:
        """Empty Redis."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._ports["redis"])
        except OSError:
            return False
        writer.write(b"FLUSHALL\r\n")
        await writer.drain()
        response = await reader.readline()
        writer.close()
        return response.startswith(b"+OK")

    async def stop_postgres(self, how: Any, seconds: float) -> bool:
        """Stop PostgreSQL for some seconds. Return False if it does not run."""
        assert self._postgres is not None
        if self._postgres_down:
            return False
        self._postgres_down = True
        try:
            await asyncio.to_thread(self._postgres.stop, how)
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(self._postgres.start)
            self._postgres_down, self._postgres_up_since = False, time.time()
        return True

    async def _read(self, query: str) -> list[Any]:
        def read() -> list[Any]:
            if self._postgres is None:
                with sqlite3.connect(self.database.removeprefix("sqlite:///"), timeout=5) as connection:
                    return connection.execute(query).fetchall()
            with psycopg.connect(self.database, connect_timeout=2, autocommit=True) as connection:
                return connection.execute(query.encode()).fetchall()

        try:
            return await asyncio.to_thread(read)
        except (psycopg.Error, OSError) as error:
            self.log(f"{query}: {error}")
            return []

    def unexpected(self) -> list[str]:
        """Return exits without a cause. A gateway may exit with 0 when another one has taken its place."""
        return [
            f"{name} exited by itself with {code}"
            for _, name, code in self.exits
            if code or not name.startswith("gateway")
        ]

    # The end

    async def settle(self, journal: Journal) -> list[str]:
        """Let agents end their episodes and the trainer train what is ready; return what did not happen in time."""
        problems = []
        journal.write("settling")
        if not await self.agents.end(self.plan.settle_s):
            problems.append(f"agents did not end within {self.plan.settle_s:g} s")
        try:
            await self.until(self._drained, "nothing is left to be trained", self.plan.settle_s)
        except TimeoutError as error:
            problems.append(f"{error}: {self._left}")
        await self.trainer.end(0)
        journal.write("settled", problems=problems)
        exited = await asyncio.gather(*(process.end(30.0) for process in self.gateways))
        late = [p.name for p, in_time in zip(self.gateways, exited, strict=True) if not in_time]
        problems += [f"{name} did not exit at SIGTERM" for name in late]
        journal.flush()
        return problems

    _left = ""

    async def _drained(self) -> bool:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        try:
            response = await self._http.get(f"{self.front.url}/admin/v1/staleness", headers=headers)
            if not response.is_success:
                self._left = response.text[:500]
                return False
            status = await self._http.get(f"{self.front.url}/admin/v1/status", headers=headers)
            shown, opened = response.json(), status.json()["open_episodes"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self._left = repr(error)
            return False
        # One that waits for groups, which no agent opens any more, holds up all later ones.
        full = takewhile(lambda row: row["occupied"] >= self.plan.batch, shown["batches"])
        ready = [row["batch"] for row in full]
        rows = await self._read("SELECT version FROM versions WHERE state = 'updating'")
        self._left = f"{opened} episodes are open, batches {ready} are ready, versions {rows} are updating"
        return not ready and not opened and not rows

    async def _responds(self, url: str) -> bool:
        try:
            return (await self._http.get(url)).is_success
        except httpx.HTTPError:
            return False

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, seconds: float) -> None:
        """Wait for a condition. Raise TimeoutError."""
        deadline = time.monotonic() + seconds
        while not await condition():
            if not self.started and self.exits:
                raise RuntimeError(f"{self.exits[0][1]} exited during its start; its log is in {self.folder}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            await asyncio.sleep(0.2)
