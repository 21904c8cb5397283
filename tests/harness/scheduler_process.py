"""`scheduler run` in a process of its own, with a cluster file that a test writes; its engines are fake."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.client import GatewayClient, GatewayRefused
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from headgate.types import EpisodeOpened
from tests.harness.forked_programs import forked
from tests.harness.waiting import LONG_S, result_of, until

UP_S = LONG_S
KEY = "the admin key of this test"


class RunningCluster:
    """A cluster, seen from outside."""

    def __init__(self, process: LocalProcess, url: str, folder: Path) -> None:
        self.url = url
        self.process = process
        self.folder = folder
        self.admin = GatewayClient(url, KEY)

    @property
    def output(self) -> str:
        """The output of `scheduler run`."""
        return self.folder.joinpath("run.log").read_text()

    async def version(self) -> int:
        """Return the newest live version; -1 while the gateway does not respond."""
        try:
            return int((await self.admin.status())["version"])
        except (GatewayRefused, httpx.HTTPError):
            return -1

    async def engines(self) -> dict[str, str]:
        """Return the URL of each engine that is open."""
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=10.0) as http:
            try:
                response = await http.get(f"{self.url}/admin/v1/engines")
            except httpx.TransportError:
                return {}
        rows = response.json().get("engines", []) if response.is_success else []
        return {row["name"]: row["url"] for row in rows if row["state"] == "open"}

    async def until_open(self, *prefixes: str) -> dict[str, str]:
        """Wait until there is one open engine for each of these beginnings of a name, and no other."""
        found: dict[str, str] = {}

        async def there() -> bool:
            nonlocal found
            assert self.process.returncode is None, self.output
            found = await self.engines()
            return len(found) == len(prefixes) and all(
                any(name.startswith(prefix) for name in found) for prefix in prefixes
            )

        try:
            await until(there, f"open engines {prefixes}", UP_S)
        except pytest.fail.Exception as error:
            raise AssertionError(f"{error}; there are {found}\n{self.output}\n{self.tails()}") from error
        return found

    async def until_elsewhere(self, name: str, url: str) -> None:
        """Wait until an engine is open at another address."""

        async def there() -> bool:
            return (await self.engines()).get(name, url) != url

        await until(there, f"{name} is no more at {url}", UP_S)

    async def chat(self) -> str:
        """Return the response to one call."""
        opened = await self.admin.open_episode("task", mode="eval")
        reply = await self.chat_of(opened)
        await self.admin.abandon(opened.episode_id, "only one call was needed")
        return reply

    async def chat_of(self, opened: EpisodeOpened, max_tokens: int = 8) -> str:
        """Return the response to a call of an episode."""
        return (await self._ask(opened, max_tokens))["choices"][0]["message"]["content"]

    async def usage_of(self, opened: EpisodeOpened, max_tokens: int) -> dict[str, Any]:
        """Return the usage of a call of an episode."""
        return (await self._ask(opened, max_tokens))["usage"]

    async def _ask(self, opened: EpisodeOpened, max_tokens: int) -> dict[str, Any]:
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens}
        async with httpx.AsyncClient(timeout=UP_S) as http:
            headers = {"Authorization": f"Bearer {opened.api_key}"}
            response = await http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)
        response.raise_for_status()
        return response.json()

    async def fake(self, url: str, **faults: Any) -> None:
        """Set the misbehaviour of the fake engine at an address."""
        async with httpx.AsyncClient(timeout=60.0) as http:
            (await http.post(f"{url}/fake/faults", json=faults)).raise_for_status()

    async def until_in(self, call: str, engine: str) -> None:
        """Wait until a call runs in an engine."""

        async def there() -> bool:
            return any(row["call_id"] == call and row["engine"] == engine for row in await self.admin.calls())

        await until(there, f"{call} is in {engine}", UP_S)

    async def has_calls(self) -> bool:
        """Return True if a call runs or waits."""
        return bool(await self.admin.calls())

    async def has_nodes(self, *names: str) -> bool:
        """Return True if the gateway knows these nodes, and no other."""
        return {node["name"] for node in await self.admin.nodes()} == set(names)

    async def until_looked(self, node: str, tags: list[str]) -> None:
        """Wait until `scheduler run` has looked at everything once more: a look puts right what the gateway knows of a node, and
        with the second that does so the one before is over."""

        async def right() -> bool:
            return (await self.admin.node(node))["tags"] == tags

        for _ in range(2):
            await self.admin.add_node(node, [*tags, "wrong"])
            await until(right, f"{node} is put right", UP_S)

    def processes(self) -> dict[int, str]:
        """Whatever runs now with this test's folder in its command line or environment: its pid, and its command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                line = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
                known = folder.joinpath("environ").read_bytes().decode(errors="replace")
            except (OSError, ValueError):
                continue
            if f"CLUSTER_TEST_FOLDER={self.folder}\0" in known or str(self.folder) in line:
                found[int(folder.name)] = line
        return {pid: line for pid, line in found.items() if pid != os.getpid()}

    def engine_pid(self, url: str) -> int:
        """Return the process id of the engine at an address, which the gateway's command may still stand in for."""
        port = url.rpartition(":")[2]
        running = self.processes().items()
        (pid,) = [p for p, line in running if f"--port {port}" in line and "gateway.cli" not in line]
        return pid

    def tails(self) -> str:
        """Return the end of every log."""
        logs = sorted(self.folder.joinpath("logs").glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in logs)

    async def stop(self) -> int:
        """SIGTERM, and the exit status; nothing else runs any more after it."""
        self.process.terminate()
        return await result_of(self.process.wait(), "the supervisor ends", UP_S)


def write_files(folder: Path, model: Path, cluster: str, port: int | None = None) -> tuple[Path, int]:
    """Return a cluster file next to its gateway's; the cluster's, and the gateway's port."""
    port = port or free_port()
    folder.joinpath("gateway.toml").write_text(f"""
[server]
port = {port}
shutdown_s = 2.0

[models.demo]
path = "{model}"

[engine]
launch = "fake"
count = 0

[staleness]
batch = 1
eta = 0

[store]
url = "sqlite:///{folder}/gateway.db"

[control]
recording = "{folder}/control.jsonl"
""")
    path = folder / "cluster.toml"
    more = {
        "[cluster]": f'dir = "{folder}/logs"\npoll_interval_s = 0.2',
        "[gateway]": f'config = "{folder}/gateway.toml"',
        "[engine]": f'env = {{ CLUSTER_TEST_FOLDER = "{folder}" }}',
    }
    for table, keys in more.items():
        cluster = cluster if table in cluster else f"{cluster}\n{table}\n"
        cluster = cluster.replace(table, f"{table}\n{keys}")
    path.write_text(cluster)
    return path, port


@asynccontextmanager
async def run_forked(folder: Path, model: Path, cluster: str) -> AsyncIterator[RunningCluster]:
    """`run_cluster`, whose programs have their process ids and ends, and are forked from one that has imported everything."""
    async with forked(folder / "forks") as environ, run_cluster(folder, model, cluster, environ) as running:
        yield running


@asynccontextmanager
async def run_cluster(
    folder: Path, model: Path, cluster: str, env: Mapping[str, Any] | None = None, port: int | None = None
) -> AsyncIterator[RunningCluster]:
    """`scheduler run` of a cluster file, of which the gateway, at `port` if one is named, is written here."""
    path, port = write_files(folder, model, cluster, port)
    environment = {"HEADGATE_ADMIN_KEY": KEY, "CLUSTER_TEST_FOLDER": str(folder), **(env or {})}
    argv = [sys.executable, "-m", "scheduler.cli", "run", str(path)]
    process = await LocalProcess.start("scheduler run", argv, folder / "run.log", environment)
    running = RunningCluster(process, f"http://127.0.0.1:{port}", folder)
    try:
        yield running
    finally:
        await running.admin.close()
        await process.stop(30.0)


async def run_to_end(
    folder: Path, model: Path, cluster: str, *options: str, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Return the exit status and the output of `scheduler run` with --check, or of a file that cannot run."""
    path, _ = write_files(folder, model, cluster)
    argv = [sys.executable, "-m", "scheduler.cli", "run", str(path), *options]
    process = await LocalProcess.start("scheduler run", argv, folder / "check.log", env)
    try:
        status = await result_of(process.wait(), "the supervisor has checked its files", UP_S)
    finally:
        await process.stop(1.0)
    return status, folder.joinpath("check.log").read_text()


RANK = """
import json, os, pathlib, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HEADGATE_TRAIN_NODES", "HEADGATE_ADMIN_KEY")
given = {name: os.environ.get(name) for name in names}
partial = pathlib.Path(FOLDER, f"rank-{os.environ['RANK']}.tmp")
partial.write_text(json.dumps(given))
partial.rename(pathlib.Path(FOLDER, f"rank-{os.environ['RANK']}-{os.getpid()}.json"))
while not pathlib.Path(FOLDER, "done").exists():
    time.sleep(0.05)
"""


def trainer(folder: Path, ranks: int, **keys: str) -> str:
    """Return a `[trainer]` whose ranks write down their environment, and end once there is a file `done`."""
    folder.joinpath("rank.py").write_text(RANK.replace("FOLDER", repr(str(folder))))
    more = "\n".join(f"{key} = {value}" for key, value in keys.items())
    return f'[trainer]\ncommand = ["{{python}}", "{folder}/rank.py"]\nranks = {ranks}\n{more}\n'
