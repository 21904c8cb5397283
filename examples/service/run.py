"""`make up`: the whole service as processes of this machine, in one terminal; Ctrl-C ends all of it.

    python -m examples.service.run                      # fake engines
    python -m examples.service.run --engine vllm        # vLLM on the CPU, and the demo's small model
    python -m examples.service.run --stop               # what `make up STOP=1` does

The same topology as compose.yaml: PostgreSQL, Redis, two gateway processes, engines, and Prometheus if it is installed. Data,
logs and keys stay in one folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from examples.service.programs import NotInstalled
from examples.service.servers import start_postgres, start_prometheus, start_redis
from headgate.client import GatewayClient
from headgate.processes.child import LocalProcess
from headgate.processes.errors import ChildDied
from headgate.processes.interrupts import Interrupted, interruptible

_HERE = Path(__file__).parent
_START_S = 300.0
_END_S = 60.0
"""The gateway's processes let running calls finish."""
_RECIPES = {"fake": _HERE / "warmstart.toml", "vllm": _HERE.parent / "demo" / "warmstart.toml"}
console = Console(highlight=False)


@dataclass(frozen=True)
class Keys:
    """Made at the first start, and the same ever after."""

    admin: str
    cluster: str
    postgres: str
    redis: str

    @classmethod
    def kept(cls, path: Path) -> Keys:
        """Read the keys from their file, which only its owner can read."""
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text("".join(f"{name}={secrets.token_hex(24)}\n" for name in _KEYS))
        found = dict(line.split("=", 1) for line in path.read_text().splitlines())
        return cls(*(found[name] for name in _KEYS))


_KEYS = ("HEADGATE_ADMIN_KEY", "HEADGATE_CLUSTER_KEY", "POSTGRES_PASSWORD", "REDIS_PASSWORD")


@dataclass(frozen=True)
class Service:
    """The processes to run, and their ports."""

    folder: Path
    engine: str
    port: int
    workers: int
    model: Path | None

    @property
    def url(self) -> str:
        """The gateway's."""
        return f"http://127.0.0.1:{self.port}"

    async def run(self) -> None:
        """Start everything in order; stop it in the opposite order once something ends. Raise ChildDied or NotInstalled."""
        self.folder.mkdir(parents=True, exist_ok=True)
        keys = Keys.kept(self.folder / "keys.env")
        async with AsyncExitStack() as stack:
            pid = self.folder / "pid"
            pid.write_text(str(os.getpid()))
            stack.callback(pid.unlink)
            await self._make_model()
            postgres, store = await start_postgres(self.folder, keys.postgres)
            stack.push_async_callback(postgres.stop)
            redis, bus = await start_redis(self.folder, keys.redis)
            stack.push_async_callback(redis.stop)
            environment = {
                "HEADGATE_ADMIN_KEY": keys.admin,
                "HEADGATE_CLUSTER_KEY": keys.cluster,
                "HEADGATE_STORE_URL": store,
                "HEADGATE_BUS_URL": bus,
            }
            gateway = await self._start_gateway(environment)
            stack.push_async_callback(gateway.stop, _END_S)
            await self._ready(gateway)
            running = [postgres, redis, gateway]
            prometheus = await start_prometheus(self.folder, self.folder / "targets.json")
            if prometheus is not None:
                stack.push_async_callback(prometheus[0].stop)
                running.append(prometheus[0])
            self._print_guide(keys, prometheus[1] if prometheus else None)
            raise ChildDied((await _first_end(running)).exit_report())

    async def _make_model(self) -> None:
        """Make a model unless the folder has one; only its tokenizer matters here."""
        if self.model is not None or (self.folder / "model" / "config.json").exists():
            return
        console.print("making a small model (once)")
        arguments = ["--recipe", str(_RECIPES[self.engine]), "--out", str(self.folder / "model")]
        argv = [sys.executable, "-m", "trainer.cli", "warmstart", *arguments]
        process = await LocalProcess.start("warmstart", argv, self.folder / "model.log")
        try:
            if await process.wait():
                raise ChildDied(f"the model could not be made: {process.exit_report()}")
        finally:
            await process.stop()

    async def _start_gateway(self, environment: dict[str, str]) -> LocalProcess:
        text = (_HERE / f"{self.engine}.toml").read_text()
        if self.model is not None:
            text = re.sub(r"(?m)^path = .*$", lambda _: f'path = "{self.model}"', text)
        text = re.sub(
            r"(?m)^port = 8000$", f"port = {self.port}", text.replace("runs/service/", f"{self.folder}/")
        )
        config = self.folder / "gateway.toml"
        config.write_text(text)
        options = ["--workers", str(self.workers), "--targets", str(self.folder / "targets.json")]
        if self.workers == 1:
            options = []
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), *options]
        return await LocalProcess.start("gateway", argv, self.folder / "gateway.log", environment)

    async def _ready(self, gateway: LocalProcess) -> None:
        async with GatewayClient(self.url) as client:
            with console.status("starting"):
                await gateway.ready(client.is_ready, _START_S)

    def _print_guide(self, keys: Keys, prometheus: str | None) -> None:
        rows = [
            ("agents", f"{self.url}/v1   ({self.workers} gateway processes, engines: {self.engine})"),
            ("admin API", f"{self.url}/admin/v1   key {keys.admin}"),
            ("metrics", f"{self.url}/metrics" + (f", Prometheus at {prometheus}" if prometheus else "")),
            ("files", f"{self.folder}/: gateway.toml, keys.env, logs, data"),
        ]
        for name, what in rows:
            console.print(f"{name:<10} {what}", soft_wrap=True)
        request = f"curl -s {self.url}/admin/v1/episodes -H 'authorization: Bearer {keys.admin}'"
        console.print(
            f"next       {request} -H 'content-type: application/json' -d '{{\"task_id\": \"t1\"}}'",
            soft_wrap=True,
        )
        console.print(
            "           gives an agent its URL and key; read docs/topics/deployment.md next. Ctrl-C stops the whole service."
        )


async def _first_end(running: Sequence[LocalProcess]) -> LocalProcess:
    """Wait until one of the processes ends, and return it."""
    waits = {asyncio.create_task(process.wait(), name=process.name): process for process in running}
    try:
        ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return waits[ended.pop()]


async def _main(service: Service) -> int:
    try:
        await interruptible(service.run(), console.print, "stopping the gateway, Redis and PostgreSQL")
    except Interrupted:
        return 0
    except (ChildDied, NotInstalled, TimeoutError) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    return 0


def _stop(folder: Path) -> int:
    try:
        pid = int((folder / "pid").read_text())
        if b"examples.service" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            raise ProcessLookupError
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        console.print(f"nothing runs in {folder}")
        return 0
    until = time.monotonic() + 2 * _END_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    return int(Path(f"/proc/{pid}").exists())


def main() -> None:
    """Start the service, and wait until it ends."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.service.run", description="headgate as a service."
    )
    parser.add_argument("--engine", choices=sorted(_RECIPES), default="fake")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=2, help="gateway processes")
    parser.add_argument("--model", type=Path, help="a Hugging Face checkpoint instead of the small one")
    parser.add_argument("--dir", type=Path, default=Path("runs/service"), help="for data, logs and keys")
    parser.add_argument("--stop", action="store_true", help="end the one that runs in --dir")
    given = parser.parse_args()
    if given.stop:
        raise SystemExit(_stop(given.dir))
    service = Service(given.dir, given.engine, given.port, given.workers, given.model)
    raise SystemExit(asyncio.run(_main(service)))


if __name__ == "__main__":
    main()
