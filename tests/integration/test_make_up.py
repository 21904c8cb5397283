"""`make up`: the whole service, a real call through it, what Prometheus sees of it, and nothing that is left behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.service.programs import find_program
from headgate.client import GatewayClient
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from reference.pages import PAGES
from tests.harness.agents import sdk
from tests.harness.gateway_command import command_line, descendants
from tests.harness.waiting import LONG_S, until

ROOT = Path(__file__).parents[2]
WORDS = re.compile(r"\b(headgate_\w+|process_\w+|up)\b")
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that PostgreSQL reaches although it runs as another user: pytest's are closed to others."""
    made = Path(tempfile.mkdtemp(prefix="headgate-service-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def port() -> int:
    """Chosen when it is needed: what was free long before may be taken by then."""
    return free_port()


@asynccontextmanager
async def up(folder: Path, model: Path, port: int) -> Any:
    """Run `make up` with a model that exists already, and kill it in the end if it has not ended."""
    options = ["--dir", str(folder / "service"), "--model", str(model), "--port", str(port)]
    argv = [sys.executable, "-m", "examples.service.run", *options]
    process = await LocalProcess.start("service", argv, folder / "service.log")
    try:

        async def is_up() -> bool:
            assert process.returncode is None, process.tail(100)
            return "Ctrl-C stops the whole service" in process.tail(100)

        await until(is_up, "the service reports that it is up")
        yield process
    finally:
        await process.stop(60.0)


@pytest.mark.long
async def test_the_service_is_up_serves_is_seen_and_leaves_nothing_behind(
    folder: Path, tiny_model: Path, port: int
) -> None:
    async with up(folder, tiny_model, port) as process:
        everyone = descendants(process.pid)
        commands = " ".join(map(command_line, everyone))
        for part in (
            "gateway.cli serve",
            "gateway.engines.fake",
            find_program("redis-server").name,
            "postgres",
        ):
            assert part in commands
        await _call(folder, port)
        await _check_metrics(folder)
        if found := re.search(r"Prometheus at (\S+)", process.tail(100)):
            await _check_queries(found[1])
        assert (folder / "service" / "keys.env").stat().st_mode & 0o077 == 0

        everyone = descendants(process.pid)
        process._process.send_signal(signal.SIGINT)
        assert await process.wait() == 0, process.tail(100)
        assert [line for line in map(command_line, everyone) if line] == []
        assert not (folder / "service" / "pid").exists()


async def _call(folder: Path, port: int) -> None:
    keys = dict(line.split("=", 1) for line in (folder / "service" / "keys.env").read_text().splitlines())
    async with GatewayClient(f"http://127.0.0.1:{port}", keys["HEADGATE_ADMIN_KEY"]) as admin:
        opened = await admin.open_episode("task", mode="eval")
        for _ in range(4):  # by connections of their own: either process may serve it
            async with sdk(opened) as client:
                response = await client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=8
                )
                assert response.choices[0].finish_reason in ("stop", "length")
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(model="any", messages=[], max_tokens=8)
        assert len((await admin.trajectory(opened.episode_id))["nodes"]) >= 4


def _shown() -> list[str]:
    """The PromQL of the dashboard and of the alerts."""
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "headgate.json").read_text())
    found = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    alerts = (ROOT / "deploy" / "alerts.yml").read_text()
    return [*found, *re.findall(r"expr: (.*)", alerts)]


async def _check_metrics(folder: Path) -> None:
    """Everything that is shown is there, in the process that has it."""
    names = {"up"}
    known = set(re.findall(r"^\| `(\w+)`", PAGES["metrics"](), re.MULTILINE))
    targets = json.loads((folder / "service" / "targets.json").read_text())
    assert len(targets) == 2
    async with httpx.AsyncClient(timeout=LONG_S) as http:
        for target in targets:
            for family in text_string_to_metric_families(await _metrics(http, target["targets"][0])):
                name = family.name.removesuffix("_created")
                assert {name, f"{name}_total"} & known, name
                names |= {family.name + suffix for suffix in SUFFIXES[family.type]}
    for query in _shown():
        assert set(WORDS.findall(query)) <= names, query


async def _metrics(http: httpx.AsyncClient, target: str) -> str:
    """The page of one process; the service is up once either of the two responds."""
    pages: list[str] = []

    async def responses() -> bool:
        with suppress(httpx.TransportError):
            pages.append((await http.get(f"http://{target}/metrics")).text)
        return bool(pages)

    await until(responses, f"{target} answers")
    return pages[-1]


async def _check_queries(prometheus: str) -> None:
    """Prometheus understands every query, and has found both processes."""
    async with httpx.AsyncClient(base_url=prometheus, timeout=LONG_S) as http:
        for query in _shown():
            query_of = {"query": query.replace("$__rate_interval", "1m")}
            assert (await http.get("/api/v1/query", params=query_of)).json()["status"] == "success", query

        async def both() -> bool:
            found = (await http.get("/api/v1/targets")).json()["data"]["activeTargets"]
            return [target["health"] for target in found] == ["up", "up"]

        await until(both, "Prometheus has scraped both processes")
