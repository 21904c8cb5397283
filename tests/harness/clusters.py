"""Several gateways of one cluster in the test's event loop, on a real PostgreSQL, with fake engines that outlive them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from gateway.app import create_app, leave
from gateway.cluster import membership
from gateway.cluster.role import Coordinator
from gateway.config.settings import Settings
from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from tests.harness.expiry import LEASE_S
from tests.harness.gateways import serve, settings_for
from tests.harness.waiting import until

CLUSTER_KEY = "the-key-of-the-cluster"
LIMIT_S = 300.0


@dataclass
class Member:
    """One gateway process, as far as one event loop can hold several."""

    url: str
    app: Any
    lost: list[BaseException] = field(default_factory=list)

    @property
    def services(self) -> Any:
        """The process's parts."""
        return self.app.state.services

    @property
    def role(self) -> str:
        """coordinator, follower or starting."""
        return str(self.services.membership.role)

    def client(self, key: str, **kwargs: Any) -> httpx.AsyncClient:
        """Return an HTTP client of this process alone."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=LIMIT_S, **kwargs)

    async def chat(self, key: str, *messages: Any, **body: Any) -> httpx.Response:
        """One chat completion, served here."""
        given = [{"role": "user", "content": "hi"}] if not messages else list(messages)
        async with self.client(key) as http:
            return await http.post("/v1/chat/completions", json={"model": "any", "messages": given, **body})


class Cluster:
    """Its members, in the order of their start."""

    def __init__(self, values: dict[str, Any], ports: list[int], stack: AsyncExitStack) -> None:
        self.members: list[Member] = []
        self.engines: list[FakeEngine] = [FakeEngine("none") for _ in ports]
        self.values = values
        self._ports = ports
        self._serving: dict[int, AsyncExitStack] = {}
        self._stack = stack
        self._running: dict[str, AsyncExitStack] = {}

    async def start_engine(self, number: int) -> None:
        """Start an engine without weights or a label."""
        self.engines[number] = engine = FakeEngine(str(self.values["models"]["demo"]["path"]))
        self._serving[number] = own = AsyncExitStack()
        await own.enter_async_context(serve(create_fake_app(engine), self._ports[number]))
        self._stack.push_async_callback(own.aclose)

    async def restart_engine(self, number: int) -> None:
        """Restart an engine at the same address, faster than the next check of its health."""
        await self._serving.pop(number).aclose()
        await self.start_engine(number)

    async def add(self) -> Member:
        """Start one more member, and wait for its place."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        values = {
            **self.values,
            "server": {**self.values.get("server", {}), "port": port},
            "cluster": {**self.values["cluster"], "url": url},
        }
        own = AsyncExitStack()
        lost: list[BaseException] = []
        app = create_app(Settings.parse(values), lost.append)
        await own.enter_async_context(serve(app, port))
        member = Member(url, app, lost)
        self._running[url] = own
        self._stack.push_async_callback(own.aclose)
        self.members.append(member)
        await until(lambda: placed(member), "the member has a place")
        return member

    async def stop(self, member: Member) -> None:
        """End a member in the order in which `GatewayServer` does; calls that run are cut."""
        self.members.remove(member)
        member.app.state.drain.begin()
        member.app.state.drain.end()
        # Or the next one would wait for the lease's end, where the database is slow
        with mock.patch.object(membership, "_RESIGN_S", LIMIT_S):
            await leave(member.services)
        await self._running.pop(member.url).aclose()

    @property
    def coordinator(self) -> Member:
        """The member that coordinates."""
        return next(member for member in self.members if member.role == "coordinator")

    @property
    def followers(self) -> list[Member]:
        """The others."""
        return [member for member in self.members if member.role == "follower"]

    @asynccontextmanager
    async def admin(self, member: Member | None = None) -> AsyncIterator[GatewayClient]:
        """Yield an admin client, of any member."""
        async with GatewayClient((member or self.members[0]).url, None) as client:
            yield client


def placed(member: Member) -> bool:
    """Return whether it coordinates with all engines open, or follows."""
    services = member.services
    if member.role == "follower":
        return bool(services.role.linked.is_set())
    slots = [slot for model in services.models for slot in model.pool.slots.values()]
    return isinstance(services.role, Coordinator) and {slot.state for slot in slots} == {"open"}


@asynccontextmanager
async def run_cluster(
    store: str, model: Path, work: Path, members: int = 2, engines: int = 1, **overrides: Any
) -> AsyncIterator[Cluster]:
    """Yield a cluster on the database `store`, its engines in this event loop."""
    async with AsyncExitStack() as stack:
        ports = [free_port() for _ in range(engines)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        values = settings_for(model, work, **overrides)
        values["store"] = {"url": store}
        values["engine"] = {**values["engine"], "launch": "external", "urls": urls}
        values["cluster"] = {"key": CLUSTER_KEY, "lease_s": LEASE_S, **values.get("cluster", {})}
        cluster = Cluster(values, ports, stack)
        for number in range(engines):
            await cluster.start_engine(number)
        for _ in range(members):
            await cluster.add()
        yield cluster
