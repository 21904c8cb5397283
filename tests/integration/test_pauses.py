"""Engines that people pause and resume: where their calls go, what an update and a death do then, who may pause."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.harness.agents import finished, start_held
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.clusters import run_cluster
from tests.harness.gateways import run_gateway, slots, two_engines
from tests.harness.records import check_everything, check_sampled_by_the_fake, nodes_of
from tests.harness.servers import PostgresServer
from tests.harness.stores import postgres_store
from tests.harness.waiting import LONG_S, until


async def test_calls_of_a_paused_engine_go_on_elsewhere_and_versions_pass_it_by(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        agents, done = await start_held(gateway, 8, 2)
        first, second = slots(gateway)
        paused = await gateway.admin.pause_engine(first.name, LONG_S)
        assert (paused["state"], paused["paused"], paused["streams"]) == ("asleep", True, 0)
        assert paused["reason"] == "it is paused"
        await arrived(gateway, 8, second)
        assert (await gateway.admin.publish(1, str(versions[1]), wait_s=LONG_S))["state"] == "live"
        assert (first.state, first.version, second.version) == ("asleep", 0, 1)
        await gateway.admin.pause_engine(first.name, LONG_S)
        assert (await gateway.fake("state", first))["running"] == 0
        resumed = await gateway.admin.resume_engine(first.name, LONG_S)
        assert (resumed["state"], resumed["paused"], resumed["version"]) == ("open", False, 1)
        await release(gateway)
        await check_everything(gateway, versions, await finished(agents, done))


async def test_a_call_waits_while_the_only_engine_is_paused(tiny_model: Path, tmp_path: Path) -> None:
    values = two_engines(tiny_model, tmp_path, engine={"count": 1})
    async with run_gateway(values, in_process=False) as gateway:
        (slot,) = slots(gateway)
        await hold_after(gateway, 3)
        episode, headers = await gateway.open(mode="eval")
        task = asyncio.create_task(gateway.chat(headers, max_tokens=8), name="call")
        await arrived(gateway, 1)
        await gateway.admin.pause_engine(slot.name, LONG_S)
        (call,) = await gateway.admin.calls()
        assert (call["engine"], call["tokens"], gateway.model.pool.waiting) == (None, 3, 1)
        await release(gateway)
        await gateway.admin.resume_engine(slot.name)
        assert (await task).status_code == 200
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], {0: tiny_model.resolve()})
        (record,) = (await gateway.admin.episode(episode))["calls"]
        assert record["pauses"] == 1


async def test_an_engine_that_dies_while_it_is_paused_starts_when_it_is_resumed(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        first, second = slots(gateway)
        pid = (await gateway.admin.pause_engine(first.name, LONG_S))["pid"]
        os.killpg(pid, signal.SIGKILL)
        await until(lambda: first.process is None, "its end is seen")
        assert (first.state, first.paused, second.state) == ("quarantined", True, "open")
        resumed = await gateway.admin.resume_engine(first.name, LONG_S)
        assert (resumed["state"], resumed["restarts"]) == ("open", 1)
        assert resumed["pid"] != pid
        refused = await gateway.http.post("/admin/v1/engines/nobody/pause")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_engine")


async def test_either_process_of_a_cluster_pauses_an_engine_for_both(
    postgres: PostgresServer, tiny_model: Path, tmp_path: Path
) -> None:
    async with run_cluster(postgres_store(postgres), tiny_model, tmp_path, engines=2) as cluster:
        (follower,) = cluster.followers
        async with cluster.admin(follower) as admin:
            first, _ = await admin.engines()
            paused = await admin.pause_engine(first["name"], LONG_S)
            assert (paused["state"], paused["paused"]) == ("asleep", True)
            sampled = cluster.engines[0].sampled
            for member in cluster.members:
                opened = await admin.open_episode("t")
                assert (await member.chat(opened.api_key)).status_code == 200
            assert cluster.engines[0].sampled == sampled
            assert cluster.engines[1].sampled > 0
            assert (await admin.resume_engine(first["name"], LONG_S))["state"] == "open"
