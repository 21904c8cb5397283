"""A gateway on a port of its own in the test's event loop, with a fake engine in the same loop or as its child."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import uvicorn

from gateway.app import create_app
from gateway.cli.serve import KEEP_ALIVE_S
from gateway.config.settings import Settings
from gateway.connection import Connection
from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from scheduler.policies.staleness_events import Publish
from tests.harness.stores import make_tables
from tests.harness.waiting import LONG_S


@dataclass
class RunningGateway:
    """A running gateway and clients that talk to it."""

    url: str
    settings: Settings
    admin: GatewayClient
    http: httpx.AsyncClient
    services: Any
    engine: FakeEngine | None
    agents: list[asyncio.Task[Any]] = field(default_factory=list)
    """The agents that `start_agents` has started."""

    @property
    def model(self) -> Any:
        """The trained model."""
        return self.services.coordinator.models.get_trained()

    @property
    def slot(self) -> Any:
        """The first engine's."""
        return next(iter(self.model.pool.slots.values()))

    def let_in(self) -> None:
        """Open the first engine, which a test held."""
        self.slot.confirm(self.slot.version)
        self.model.pool.notify()

    async def as_if_published(self, version: int) -> None:
        """Publish a version to the ledger, and let the fake engine in this process count as running it."""
        assert self.engine is not None
        self.engine.label = str(version)
        self.slot.confirm(version)
        self.model.pool.notify()
        await self.model.ledger.apply(Publish(version))

    async def fake(self, path: str, slot: Any = None, **values: Any) -> dict[str, Any]:
        """Request `faults` or `state` of a fake engine: of the first, if no slot is named."""
        response = await self.http.post(f"{(slot or self.slot).url}/fake/{path}", json=values)
        response.raise_for_status()
        return response.json()

    async def open(self, task: str = "task", **kwargs: Any) -> tuple[str, dict[str, str]]:
        """Return an open episode's id, and the headers of its agent."""
        opened = await self.admin.open_episode(task, **kwargs)
        return opened.episode_id, {"Authorization": f"Bearer {opened.api_key}"}

    async def begin(self, task: str = "task", **kwargs: Any) -> tuple[str, dict[str, str]]:
        """Open an episode as `open` does, and sample a token in it."""
        episode, headers = await self.open(task, **kwargs)
        await self.sample(headers)
        return episode, headers

    async def sample(self, headers: dict[str, str], **body: Any) -> None:
        """Sample a token, without which no reward of an episode counts."""
        response = await self.chat(headers, **{"max_tokens": 1, **body})
        assert response.status_code == 200, response.text

    async def chat(self, headers: dict[str, str], **body: Any) -> httpx.Response:
        """One chat completion."""
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], **body}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)


@asynccontextmanager
async def serve(app: Any, port: int, http: type[asyncio.Protocol] = Connection) -> AsyncIterator[None]:
    """Yield an ASGI application on a loopback port. Raise OSError if it is in use; uvicorn would end the test process."""
    config = uvicorn.Config(
        app,
        http=http,
        log_config=None,  # to configure logging again costs a tenth of a gateway's start
        log_level="warning",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config)
    # asyncio turns Nagle's algorithm off for sockets that name the protocol alone: on, replies wait 40 ms.
    at = socket.socket(proto=socket.IPPROTO_TCP)
    at.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        at.bind(("127.0.0.1", port))
    except OSError:
        at.close()
        raise
    task = asyncio.create_task(server.serve([at]), name=f"server-{port}")
    serving = asyncio.create_task(server.serving.wait(), name=f"server-{port}-starts")
    try:
        await asyncio.wait({task, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not server.started:
            task.result()
            raise RuntimeError("the server did not start")
        yield
    finally:
        serving.cancel()
        server.should_exit = True
        server.ending.set()
        await task


class _Server(uvicorn.Server):
    """Uvicorn's, without its tenths of a second: it starts and ends as soon as it can, not at the next tick of a clock."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()
        self.ending = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.ending.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # the headers of every response
        self.serving.set()
        await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            for running in self.server_state.tasks:
                running.cancel()
        await self.lifespan.shutdown()


def settings_for(model: Path, work: Path, **overrides: Any) -> dict[str, Any]:
    """Return settings with every path inside the test's folder. Engines at a barrier are silent and healthy; no keep-alive
    comes between events, however slow the machine is."""
    values: dict[str, Any] = {
        "server": {"port": free_port(), "keep_alive_s": 3600.0},
        "models": {"demo": {"path": str(model)}},
        "engine": {"launch": "fake", "log": str(work / "engine.log"), "stall_s": 3600.0},
        "store": {"url": f"sqlite:///{work}/gateway.db"},
        "control": {"recording": str(work / "control.jsonl")},
    }
    for section, given in overrides.items():
        values[section] = {**values.get(section, {}), **given}
    return values


@asynccontextmanager
async def run_gateway(values: dict[str, Any], *, in_process: bool = True) -> AsyncIterator[RunningGateway]:
    """Yield a gateway; with `in_process` its engine is a fake one in this event loop, which the test can bend."""
    values = copy.deepcopy(values)
    async with AsyncExitStack() as stack:
        engine = None
        if in_process:
            engine, port = FakeEngine("none"), free_port()
            await stack.enter_async_context(serve(create_fake_app(engine), port))
            values["engine"].update(launch="external", url=f"http://127.0.0.1:{port}")
        settings = Settings.parse(values)
        make_tables(settings.store.url)
        app = create_app(settings)
        await stack.enter_async_context(serve(app, settings.server.port))
        url = settings.server.url
        key = settings.admin.key.get_secret_value() if settings.admin.key else None
        admin = await stack.enter_async_context(GatewayClient(url, key, LONG_S))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=LONG_S))
        yield RunningGateway(url, settings, admin, http, app.state.services, engine)


Engines = dict[str, FakeEngine]


@asynccontextmanager
async def gateway_of(
    model: Path, work: Path, models: dict[str, dict[str, Any]], **overrides: Any
) -> AsyncIterator[tuple[RunningGateway, Engines]]:
    """Yield a gateway whose models have a fake engine each, in this event loop."""
    staleness = {"batch": 1, "eta": 0, "min_members": 1}
    values = settings_for(model, work, **{"staleness": staleness, **overrides})
    async with AsyncExitStack() as stack:
        engines: Engines = {}
        for name, given in models.items():
            engines[name], port = FakeEngine("none"), free_port()
            await stack.enter_async_context(serve(create_fake_app(engines[name]), port))
            engine = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
            models[name] = {"path": str(model), "engine": engine, **given}
        values["models"] = models
        yield await stack.enter_async_context(run_gateway(values, in_process=False)), engines


async def faults(gateway: RunningGateway, **values: Any) -> None:
    await gateway.fake("faults", **values)


async def running(gateway: RunningGateway) -> int:
    """Return the number of requests in the engine, by its own count."""
    return (await gateway.fake("state"))["running"]


def two_engines(model: Path, work: Path, **overrides: Any) -> dict[str, Any]:
    engine = {"launch": "fake", "count": 2, **overrides.pop("engine", {})}
    return settings_for(model, work, engine=engine, **overrides)


def slots(gateway: RunningGateway) -> list[Any]:
    return list(gateway.model.pool.slots.values())
