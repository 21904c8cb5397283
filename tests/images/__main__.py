"""`python -m tests.images`: builds the gateway's image, and lets an agent ask the processes of compose.yaml that run in it."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import openai
import typer
import yaml

from bench.report import Steps, finish, machine, show
from bench.servers import free_port, postgres_server, redis_server
from headgate.client import GatewayClient
from headgate.processes.child import LocalProcess
from tests.harness.models import save_model
from tests.images.build import ROOT, Builder, NotPossible

_IMAGE = "headgate-gateway:0.2.0"
_DOCKERFILE = "deploy/gateway.Dockerfile"
_KEY = "the-admin-key-of-the-check"
_START_S = 120.0
_CONFIG, _MODEL = "/etc/headgate/gateway.toml", "/models/base"


def main(
    work: Annotated[Path, typer.Option(help="Where the base, the images and logs are kept.")] = Path(
        "runs/images"
    ),
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/images.json"),
) -> None:
    """Build the gateway's image without Docker, and run compose.yaml's gateway and fake engine from it.

    Real PostgreSQL and Redis of this machine; the commands, users and mounts are those of compose.yaml, the ports are free ones,
    for the containers share this machine's network. An agent asks, the gateway is killed with -9 and started again, the agent
    asks again.

    Example: python -m tests.images
    """
    try:
        report = asyncio.run(_check(Builder(work.resolve())))
    except NotPossible as error:
        typer.echo(f"images cannot be built here: {error}", err=True)
        raise typer.Exit(2) from error
    rows = [[name, str(value)] for name, value in report.items() if not isinstance(value, dict)]
    show("The image of the gateway, without Docker", ("figure", "value"), rows)
    finish({**report, "machine": machine()}, out)
    raise typer.Exit(int(report["answers"] != report["requests"]))


async def _check(builder: Builder) -> dict[str, Any]:
    builder.check()
    began = time.monotonic()
    with Steps(4) as steps:
        steps.begin("base of Debian packages")
        found = re.search(r"^FROM (\S+)", (ROOT / _DOCKERFILE).read_text(), re.MULTILINE)
        assert found is not None
        await asyncio.to_thread(builder.base, found[1])
        steps.begin(f"buildah: {_DOCKERFILE}")
        await asyncio.to_thread(builder.build, _DOCKERFILE, _IMAGE)
        built_s = time.monotonic() - began
        with postgres_server() as postgres, redis_server() as redis:
            stores = {
                "HEADGATE_STORE_URL": postgres.url(postgres.new_database()),
                "HEADGATE_BUS_URL": redis.url,
            }
            stack = Stack(builder, stores)
            async with stack.engine():
                first = await stack.serve_and_ask("a gateway that is killed", steps, kill=True)
                second = await stack.serve_and_ask("another one on the same database", steps)
    return {
        "user": stack.user, "build_s": round(built_s, 1), "requests": 2, "answers": sum(map(bool, (first, second))),
        "episodes_kept": stack.episodes,
    }  # fmt: skip


class Stack:
    """The services `gateway` and `fake-engine` of compose.yaml, in containers of one image."""

    def __init__(self, builder: Builder, stores: dict[str, str]) -> None:
        self._builder, self._stores = builder, stores
        self._services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
        self._container = builder.container(_IMAGE)
        self.user = builder.user(self._container)
        self.episodes = 0
        self._engine_port, self._port, self._cluster_port = free_port(), free_port(), free_port()
        self._model = builder.folder / "model"
        save_model(self._model, seed=1)
        for path in self._model.iterdir():
            path.chmod(0o644)
        text = (ROOT / "deploy" / "gateway.toml").read_text()
        self._config = builder.folder / "gateway.toml"
        self._config.write_text(
            text.replace("port = 8000", f"port = {self._port}")
            .replace("http://engine:8000", f"http://127.0.0.1:{self._engine_port}")
            .replace('family = "auto"', 'family = "qwen3"')
        )

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[None]:
        """The fake engine, while it runs."""
        command = [
            str(self._engine_port) if part == "8000" else part
            for part in self._services["fake-engine"]["command"]
        ]
        process = await self._start("fake-engine", command, {}, {self._model: _MODEL})
        try:
            await self._ready(process, self._engine_port, "/health")
            yield
        finally:
            await process.stop(10)

    async def serve_and_ask(self, name: str, steps: Steps, kill: bool = False) -> str:
        """Start a gateway, let an agent send a request, and end it; return the reply."""
        steps.begin(name)
        command = [
            part.replace("$$", "$").replace("$(hostname):8001", f"127.0.0.1:{self._cluster_port}")
            for part in self._services["gateway"]["command"]
        ]
        env = {
            **self._stores, "HEADGATE_ADMIN_KEY": _KEY, "HEADGATE_CLUSTER_KEY": "0123456789abcdef",
            "HEADGATE_PUBLIC_URL": f"http://127.0.0.1:{self._port}",
        }  # fmt: skip
        assert {
            v for v in self._services["gateway"]["environment"] if v != "HEADGATE_ENGINE_URLS"
        } == env.keys()
        process = await self._start("gateway", command, env, {self._model: _MODEL, self._config: _CONFIG})
        try:
            await self._ready(process, self._port, "/readyz")
            return await self._ask()
        finally:
            await process.stop(0 if kill else 60)  # 0: SIGKILL immediately

    async def _ask(self) -> str:
        url = f"http://127.0.0.1:{self._port}"
        async with GatewayClient(url, _KEY) as admin:
            episode = await admin.open_episode("t1")
            agent = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
            async with agent:
                messages: Any = [{"role": "user", "content": "hello"}]
                reply = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=16)
            self.episodes = len(await admin.episodes())
        return reply.choices[0].message.content or ""

    async def _start(
        self, name: str, command: list[str], env: dict[str, str], mounts: dict[Path, str]
    ) -> LocalProcess:
        argv = self._builder.argv(self._container, command, env, mounts)
        return await LocalProcess.start(name, argv, self._builder.folder / f"{name}.log", {})

    async def _ready(self, process: LocalProcess, port: int, path: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:

            async def well() -> bool:
                try:
                    return (await http.get(f"http://127.0.0.1:{port}{path}")).status_code == 200
                except httpx.TransportError:
                    return False

            await process.ready(well, _START_S)


if __name__ == "__main__":
    sys.exit(typer.run(main))
