"""`gateway serve --workers N` with real processes and PostgreSQL: one port, one state, and dead processes are replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import openai

from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from tests.harness.expiry import LEASE_S, end_lease
from tests.harness.gateway_command import Served, command_line, descendants, served
from tests.harness.gateways import settings_for
from tests.harness.servers import PostgresServer
from tests.harness.waiting import until

KEY = "the secret key of the administrator"


def several(model: Path, work: Path, postgres: PostgresServer) -> dict[str, Any]:
    """Settings of a service: PostgreSQL and two fake engines."""
    return settings_for(
        model,
        work,
        server={"port": free_port(), "shutdown_s": 20.0},
        engine={"launch": "fake", "count": 2, "log": str(work / "engine.log"), "health_s": 0.2},
        store={"url": postgres.url(postgres.new_database())},
        cluster={"lease_s": LEASE_S},
        admin={"key": KEY},
    )


def running(gateway: Served, what: str) -> set[int]:
    """The supervisor's children whose command line has `what`."""
    return {pid for pid in descendants(gateway.process.pid) if what in command_line(pid)}


async def call(gateway: Served, times: int = 1) -> None:
    """Open an episode, and calls so often in it, each time by a new connection."""
    async with GatewayClient(gateway.url, KEY) as admin:
        opened = await admin.open_episode("task", mode="eval")
    for _ in range(times):
        async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key) as client:
            response = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=8
            )
            assert response.choices[0].finish_reason in ("stop", "length")


async def test_workers_and_engines_come_back_and_all_end_together(
    tiny_model: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    targets = tmp_path / "targets.json"
    values = several(tiny_model, tmp_path, postgres)
    async with served(values, tmp_path, "--workers", "2", "--targets", str(targets)) as gateway:
        await gateway.ready()
        await call(gateway, times=4)
        before, engines = running(gateway, "gateway.cli"), running(gateway, "gateway.engines.fake")
        assert (len(before), len(engines)) == (2, 2)

        os.kill(min(engines), signal.SIGKILL)
        await until(
            lambda: len(running(gateway, "gateway.engines.fake") - {min(engines)}) == 2,
            "the engine was started again",
        )
        for pid in sorted(before):  # one of them is the coordinator
            os.kill(pid, signal.SIGKILL)
            await until(
                lambda gone=pid: len(running(gateway, "gateway.cli") - {gone}) == 2, "it is there again"
            )
            end_lease(values["store"]["url"], pid)
            await gateway.ready()
            await call(gateway, times=2)
        assert not before & running(gateway, "gateway.cli")
        assert len(json.loads(targets.read_text())) == 2

        everyone = descendants(gateway.process.pid)
        gateway.signal()
        assert await gateway.process.wait() == 0, gateway.log
        assert not [pid for pid in everyone if command_line(pid)]


async def test_children_die_with_a_supervisor_that_is_killed(
    tiny_model: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    values = several(tiny_model, tmp_path, postgres)
    async with served(values, tmp_path, "--workers", "2") as gateway:
        await until(lambda: len(running(gateway, "gateway.")) == 4, "everyone is there")
        everyone = descendants(gateway.process.pid)
        gateway.signal(signal.SIGKILL)
        await until(lambda: not any(map(command_line, everyone)), "no process is left")


async def test_a_taken_port_is_reported_before_anything_is_started(
    tiny_model: Path, tmp_path: Path, postgres: PostgresServer
) -> None:
    values = several(tiny_model, tmp_path, postgres)
    listener = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", values["server"]["port"])
    async with listener, served(values, tmp_path, "--workers", "2") as gateway:
        assert await gateway.process.wait() == 2
        assert "cannot listen at" in gateway.log
