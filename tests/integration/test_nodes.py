"""Nodes: their tags, engines that are lent and called back in the middle of calls, and trainers that claim and release."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.client import GatewayRefused
from scheduler.program import PROGRAMS
from scheduler.reactor import replay
from tests.gateways import RunningGateway, run_gateway, settings_for
from tests.integration.support import until
from tests.integration.test_engines import finished, start_agents, versions
from tests.integration.test_updates import check_everything

__all__ = ["versions"]  # a fixture

QUICK = {"margin_s": 0.0, "min_stay_s": 0.0, "deadline_s": 20.0, "claim_s": 60.0}
BOTH = ["rollout", "train"]


def cluster(
    model: Path, work: Path, nodes: dict[str, Any], count: int = 0, delay_s: float = 0.01, **overrides: Any
) -> dict[str, Any]:
    """Settings with nodes, and `count` engines that live on none."""
    engine = {
        "launch": "fake",
        "count": count,
        "args": ["--delay-s", str(delay_s)],
        **overrides.pop("engine", {}),
    }
    lending = {**QUICK, **overrides.pop("lending", {})}
    return settings_for(model, work, engine=engine, lending=lending, nodes=nodes, **overrides)


def state_of(gateway: RunningGateway, engine: str) -> str:
    return gateway.model.pool.slots[engine].state


def streams(gateway: RunningGateway, engine: str) -> int:
    return gateway.model.pool.slots[engine].streams


async def role_of(gateway: RunningGateway, node: str) -> str:
    return (await gateway.admin.node(node))["role"]


async def becomes(gateway: RunningGateway, node: str, role: str) -> None:
    async def is_so() -> bool:
        return await role_of(gateway, node) == role

    await until(is_so, f"{node} becomes {role}", 40)


def check_replay(values: dict[str, Any]) -> None:
    """What was recorded, decided again."""
    lines = Path(values["control"]["recording"]).read_text().splitlines()
    report = replay(lines, PROGRAMS["control"])
    assert report.difference is None


async def test_a_node_is_lent_while_its_trainer_waits_and_its_calls_go_on_when_it_is_claimed(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = cluster(tiny_model, tmp_path, {"t0": {"tags": BOTH, "engines": 1}}, count=1)
    async with run_gateway(values, in_process=False) as gateway:
        assert await role_of(gateway, "t0") == "idle"
        assert state_of(gateway, "t0-0") == "asleep"
        agents, done = start_agents(gateway, 8)
        await until(lambda: streams(gateway, "demo-0") == 8, "all work in the one engine")
        await gateway.admin.release("t0")
        await becomes(gateway, "t0", "rollout")
        for version in (1, 2):
            await until(lambda: streams(gateway, "t0-0") >= 2, "the lent engine works")
            claimed = await gateway.admin.claim("t0", wait_s=30)
            assert (claimed["role"], claimed["claim_s"]) == ("train", 60.0)
            assert state_of(gateway, "t0-0") == "asleep"
            assert (await gateway.fake("state", gateway.model.pool.slots["t0-0"]))["running"] == 0
            await until(lambda: streams(gateway, "demo-0") == 8, "all work in the one engine")
            record = await gateway.admin.publish(version, str(versions[version]), wait_s=30)
            assert record["state"] == "live"
            assert [report["engine"] for report in record["report"]] == ["demo-0"]
            assert state_of(gateway, "t0-0") == "asleep"
            await gateway.admin.release("t0")
            await becomes(gateway, "t0", "rollout")
            assert gateway.model.pool.slots["t0-0"].version == version
        crossed = await check_everything(gateway, versions, await finished(agents, done))
        assert crossed
        seconds = (await gateway.admin.node("t0"))["seconds"]
        assert all(seconds[role] > 0 for role in ("idle", "switching", "train", "rollout"))
        metrics = (await gateway.http.get("/metrics")).text
        assert 'headgate_node_role{node="t0",role="rollout"} 1.0' in metrics
        assert 'headgate_node_seconds_total{node="t0",role="train"}' in metrics
    check_replay(values)
