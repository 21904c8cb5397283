"""Nodes: their tags, engines that are lent and called back in the middle of calls, and trainers that claim and release."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headgate.client import GatewayRefused
from scheduler.program import PROGRAMS
from scheduler.reactor import replay
from tests.harness.agents import finished, start_agents
from tests.harness.barrier import arrived, release, share
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.records import check_everything
from tests.harness.waiting import LONG_S, until

QUICK = {"margin_s": 0.0, "min_stay_s": 0.0, "deadline_s": 120.0, "claim_s": 3600.0}
BOTH = ["rollout", "train"]


def cluster(
    model: Path, work: Path, nodes: dict[str, Any], count: int = 0, hold_after: int = 2, **overrides: Any
) -> dict[str, Any]:
    """Settings with nodes, and `count` engines that live on none; all engines have their barrier from their start.

    Calls stay in the engines that tests put them in (`order = "rolling"`), and go where least runs, not where it costs no speed
    (`rule = "cached"`).
    """
    args = ["--hold-after", str(hold_after)]
    engine = {"launch": "fake", "count": count, "args": args, **overrides.pop("engine", {})}
    lending = {**QUICK, **overrides.pop("lending", {})}
    update = {"order": "rolling", **overrides.pop("update", {})}
    routing = {"rule": "cached", **overrides.pop("routing", {})}
    given: dict[str, Any] = {
        "engine": engine,
        "update": update,
        "routing": routing,
        "lending": lending,
        "nodes": nodes,
    }
    return settings_for(model, work, **given, **overrides)


def state_of(gateway: RunningGateway, engine: str) -> str:
    return gateway.model.pool.slots[engine].state


async def role_of(gateway: RunningGateway, node: str) -> str:
    return (await gateway.admin.node(node))["role"]


async def becomes(gateway: RunningGateway, node: str, role: str) -> None:
    async def is_so() -> bool:
        return await role_of(gateway, node) == role

    await until(is_so, f"{node} becomes {role}")


def check_replay(values: dict[str, Any]) -> None:
    """Replay the recording and compare its decisions."""
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
        own, lent = (gateway.model.pool.slots[name] for name in ("demo-0", "t0-0"))
        agents, done = start_agents(gateway, 8)
        await arrived(gateway, 8, own)
        await gateway.admin.release("t0")
        await becomes(gateway, "t0", "rollout")
        await share(gateway, 8, own, lent)
        claimed = await gateway.admin.claim("t0", wait_s=LONG_S)
        assert (claimed["role"], claimed["claim_s"]) == ("train", 3600.0)
        assert state_of(gateway, "t0-0") == "asleep"
        assert (await gateway.fake("state", lent))["running"] == 0
        await arrived(gateway, 8, own)
        record = await gateway.admin.publish(1, str(versions[1]), wait_s=LONG_S)
        assert record["state"] == "live"
        assert [report["engine"] for report in record["report"]] == ["demo-0"]
        assert state_of(gateway, "t0-0") == "asleep"
        await gateway.admin.release("t0")
        await becomes(gateway, "t0", "rollout")
        assert lent.version == 1
        await release(gateway)
        assert await check_everything(gateway, versions, await finished(agents, done)) == 8
        seconds = (await gateway.admin.node("t0"))["seconds"]
        assert all(seconds[role] > 0 for role in ("idle", "switching", "train", "rollout"))
        metrics = (await gateway.http.get("/metrics")).text
        assert 'headgate_node_role{node="t0",role="rollout"} 1.0' in metrics
        assert 'headgate_node_seconds_total{node="t0",role="train"}' in metrics
    check_replay(values)


async def test_when_every_engine_is_called_back_calls_wait_and_go_on(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    """Colocated: nothing samples while the trainer computes, and its version is live without any engine."""
    values = cluster(tiny_model, tmp_path, {"t0": {"tags": BOTH, "engines": 2}}, engine={"sleep": "level2"})
    async with run_gateway(values, in_process=False) as gateway:
        slots = gateway.model.pool.slots
        agents, done = start_agents(gateway, 4)
        await until(lambda: gateway.model.pool.waiting == 4, "all wait")
        assert (await gateway.http.get("/readyz")).is_success
        await gateway.admin.release("t0")
        await becomes(gateway, "t0", "rollout")  # both engines are open
        await arrived(gateway, 4)
        await gateway.admin.claim("t0", wait_s=LONG_S)
        await until(lambda: gateway.model.pool.waiting == 4, "all wait again")
        for slot in slots.values():
            state = await gateway.fake("state", slot)
            assert (state["asleep"], state["running"]) == (2, 0)
        record = await gateway.admin.publish(1, str(versions[1]), wait_s=LONG_S)
        assert record["state"] == "live"
        await gateway.admin.release("t0")
        await becomes(gateway, "t0", "rollout")  # both engines are open
        await arrived(gateway, 4)
        assert [slot.version for slot in slots.values()] == [1, 1]
        await release(gateway)
        assert await check_everything(gateway, versions, await finished(agents, done)) == 4
        assert [(await gateway.fake("state", slot))["refused"] for slot in slots.values()] == [0, 0]
    check_replay(values)


@pytest.mark.long  # the deadline passes
async def test_an_engine_that_hangs_in_sleep_is_killed_and_the_claim_is_served(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = cluster(
        tiny_model,
        tmp_path,
        {"t0": {"tags": BOTH, "engines": 1}},
        count=1,
        engine={"sleep": "level1"},
        lending={"deadline_s": 4.0},
    )
    async with run_gateway(values, in_process=False) as gateway:
        own, slot = (gateway.model.pool.slots[name] for name in ("demo-0", "t0-0"))
        agents, done = start_agents(gateway, 4)
        await arrived(gateway, 4, own)
        await gateway.admin.release("t0")
        await becomes(gateway, "t0", "rollout")
        await share(gateway, 4, own, slot)
        pid = slot.describe("demo")["pid"]
        await gateway.fake("faults", slot, sleep_s=3600.0)
        claimed = await gateway.admin.claim("t0", wait_s=LONG_S)
        assert claimed["role"] == "train"
        await until(lambda: not Path(f"/proc/{pid}").exists(), "the engine is killed")
        await arrived(gateway, 4, own)
        await release(gateway, own)
        await gateway.admin.release("t0")
        await until(lambda: slot.state == "open", "it is launched again")
        await release(gateway, slot)
        await check_everything(gateway, versions, await finished(agents, done))
    check_replay(values)


async def test_what_cannot_be_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    nodes = {"t0": {"tags": ["train"]}, "r0": {"tags": ["rollout"], "zone": "z"}}
    async with run_gateway(cluster(tiny_model, tmp_path, nodes, count=0), in_process=False) as gateway:
        admin = gateway.admin
        nodes_shown = await admin.nodes()
        assert [(n["name"], n["role"], n["zone"]) for n in nodes_shown] == [
            ("t0", "idle", ""),
            ("r0", "rollout", "z"),
        ]
        refusals = [
            await _refusal(admin.claim("nowhere")),
            await _refusal(admin.release("nowhere")),
            await _refusal(admin.remove_node("nowhere")),
            await _refusal(admin.claim("r0")),
            await _refusal(admin.claim("t0", model="other")),
            await _refusal(admin.add_engine(node="nowhere")),
            await _refusal(admin.add_engine(node="t0")),
            await _refusal(admin.add_node("a node", ["train"])),
            await _refusal(admin.add_node("n", [])),
        ]
        assert [(refused.status, refused.code) for refused in refusals] == [
            (404, "no_node"),
            (404, "no_node"),
            (404, "no_node"),
            (409, "node_not_for_training"),
            (404, "model_not_found"),
            (404, "no_node"),
            (409, "node_not_for_rollout"),
            (400, "invalid_value"),
            (400, "invalid_value"),
        ]
        assert "'train'" in refusals[3].message
        assert (await admin.claim("t0", wait_s=LONG_S))["role"] == "train"
        assert (await admin.release("t0"))["role"] == "idle"


async def _refusal(work: Any) -> GatewayRefused:
    with pytest.raises(GatewayRefused) as refused:
        await work
    return refused.value


async def test_nodes_and_their_engines_come_and_go(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(cluster(tiny_model, tmp_path, {}, count=0), in_process=False) as gateway:
        admin = gateway.admin
        for _ in range(2):
            node = await admin.add_node("n0", ["rollout", "a100"], zone="z1")
            assert (node["role"], node["tags"], node["zone"]) == ("rollout", ["rollout", "a100"], "z1")
        added = await admin.add_engine("e0", node="n0", wait_s=LONG_S)
        assert (added["state"], added["node"]) == ("open", "n0")
        await admin.add_node(
            "n0", BOTH
        )  # it is a trainer's node too from now on: its engine sleeps until that has spoken
        await until(lambda: state_of(gateway, "e0") == "asleep", "it falls asleep")
        assert (await admin.claim("n0", wait_s=LONG_S))["role"] == "train"
        waiting = asyncio.create_task(admin.add_engine("e1", node="n0", wait_s=LONG_S), name="added")
        assert (await waiting)["state"] == "asleep"
        removed = await admin.remove_node("n0")
        assert removed["engines"] == ["e0", "e1"]
        await until(lambda: not gateway.model.pool.slots, "its engines are gone")
        assert await admin.nodes() == []


async def test_an_engine_that_dies_on_a_claimed_node_is_not_started_before_it_is_lent_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    nodes = {"t0": {"tags": BOTH, "engines": 1}}
    values = cluster(tiny_model, tmp_path, nodes)
    async with run_gateway(values, in_process=False) as gateway:
        slot = gateway.model.pool.slots["t0-0"]
        await gateway.admin.release("t0")
        _, headers = await gateway.open(mode="eval")
        call = asyncio.create_task(gateway.chat(headers, max_tokens=12), name="call")
        await arrived(gateway, 1)
        await gateway.admin.claim("t0", wait_s=LONG_S)
        pid = slot.describe("demo")["pid"]
        os.killpg(pid, signal.SIGKILL)
        await until(lambda: slot.restarts == 1, "its death is noticed")
        assert slot.process is None
        await gateway.admin.claim("t0", wait_s=LONG_S)
        assert slot.process is None
        await gateway.admin.release("t0")
        await arrived(gateway, 1)
        await release(gateway)
        assert (await call).is_success
