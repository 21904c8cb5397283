"""Several gateway processes: an episode's calls land anywhere, and one of them decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.api.v1 import generation
from gateway.store import turns
from headgate.keys import attempt_key
from headgate.types import CRASHED_ATTEMPT, EpisodeSampling
from tests.harness.clusters import Cluster, Member, run_cluster
from tests.harness.expiry import patient_bus
from tests.harness.servers import PostgresServer, RedisServer
from tests.harness.stores import postgres_store
from tests.harness.waiting import until


@pytest.fixture
async def cluster(postgres: PostgresServer, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two members, one engine."""
    store = postgres_store(postgres)
    staleness = {"batch": 2, "eta": 1, "min_members": 1}
    async with run_cluster(store, tiny_model, tmp_path, staleness=staleness) as running:
        yield running


async def test_the_turns_of_an_episode_land_anywhere_and_make_one_tree(cluster: Cluster) -> None:
    async with cluster.admin(cluster.followers[0]) as admin:
        opened = await admin.open_episode("t")
        messages: list[object] = [{"role": "user", "content": "hi"}]
        for turn in range(6):
            member = cluster.members[turn % 2]
            response = await member.chat(opened.api_key, *messages, max_tokens=8)
            assert response.status_code == 200, response.text
            messages += [
                response.json()["choices"][0]["message"],
                {"role": "user", "content": f"go on {turn}"},
            ]
        database = cluster.coordinator.services.database
        found = (await database.read(lambda c: turns.nodes(c, "demo", [opened.episode_id])))[
            opened.episode_id
        ]
        assert sum(node.sampled for node in found) == 6
        assert [node.index for node in found] == list(range(12))
        assert sum(node.parent == -1 for node in found) == 1, (
            "each call goes on with the one before, wherever it was"
        )
        await admin.reward(opened.episode_id, 1.0)
        late = await cluster.followers[0].chat(opened.api_key)
        assert late.status_code == 409, late.text


async def test_every_member_refuses_the_key_of_a_crashed_attempt(cluster: Cluster) -> None:
    """A member that knows the episode hears of the restart."""
    async with cluster.admin(cluster.coordinator) as admin:
        opened = await admin.open_episode("t")
        for member in cluster.members:
            assert (await member.chat(opened.api_key, max_tokens=4)).status_code == 200
        key = attempt_key(opened.api_key, await admin.restart(opened.episode_id))
        for member in cluster.members:
            refused = await member.chat(opened.api_key, max_tokens=4)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "attempt_over")
            assert (await member.chat(key, max_tokens=4)).status_code == 200
        nodes = (await admin.trajectory(opened.episode_id))["nodes"]
    assert [node["mask_reason"] for node in nodes if node["sampled"]] == [CRASHED_ATTEMPT] * 2 + [""] * 2


async def test_a_follower_samples_with_the_settings_of_the_episode(cluster: Cluster) -> None:
    async with cluster.admin(cluster.coordinator) as admin:
        opened = await admin.open_episode("t", mode="eval", sampling=EpisodeSampling(temperature=0.0))
        for member in (*cluster.followers, cluster.coordinator):
            assert (await member.chat(opened.api_key, max_tokens=4)).status_code == 200
        calls = (await admin.episode(opened.episode_id))["calls"]
    assert [call["used"]["temperature"] for call in calls] == [0.0, 0.0]


async def test_the_next_member_decides_when_the_coordinator_has_left(cluster: Cluster) -> None:
    first, second = cluster.members
    async with cluster.admin(second) as admin:
        opened = await admin.open_episode("t")
        assert (await second.chat(opened.api_key)).status_code == 200
        await cluster.stop(first)
        await until(lambda: second.role == "coordinator", "the other one decides")
        response = await second.chat(opened.api_key)
        assert response.status_code == 200, response.text
        await admin.reward(opened.episode_id, 1.0)
    assert not second.lost


async def test_a_call_under_an_agents_key_outlives_a_coordinator_that_is_being_stopped(
    postgres: PostgresServer, tiny_model: Path, tmp_path: Path
) -> None:
    """The coordinator takes no new call, so the process that the agent called waits for the next one."""
    key, store = "the-key-of-the-agent", postgres_store(postgres)
    async with run_cluster(store, tiny_model, tmp_path, agents={"a": {"key": key}}) as cluster:
        first, second = cluster.members
        assert (await second.chat(key)).status_code == 200
        first.app.state.drain.begin()
        refused = await first.chat(key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        call = asyncio.create_task(second.chat(key))
        await until(lambda: second.app.state.drain.running == 1, "the call waits")
        await cluster.stop(first)
        response = await call
        assert response.status_code == 200, response.text


async def test_calls_at_once_in_one_episode_by_both_members_clash_and_are_all_recorded(
    cluster: Cluster,
) -> None:
    async with cluster.admin() as admin:
        opened = await admin.open_episode("t")
        calls = [
            cluster.members[i % 2].chat(
                opened.api_key, {"role": "user", "content": f"question {i % 3}"}, max_tokens=6
            )
            for i in range(24)
        ]
        responses = await asyncio.gather(*calls)
        assert [a.status_code for a in responses] == [200] * 24
        shown = await admin.episode(opened.episode_id)
        assert {call["id"] for call in shown["calls"]} == {response.json()["id"] for response in responses}


async def test_every_member_reports_its_cluster_and_remembers_the_last_coordinator(
    postgres: PostgresServer, redis: RedisServer, tiny_model: Path, tmp_path: Path
) -> None:
    store = postgres_store(postgres)
    async with run_cluster(store, tiny_model, tmp_path, bus=patient_bus(redis)) as cluster:
        first, second = cluster.members

        async def report_of(member: Member) -> dict[str, Any]:
            async with member.client("unknown") as http:
                found: dict[str, Any] = (await http.get("/admin/v1/cluster")).json()
                return found

        own = await report_of(first)
        assert (own["role"], len(own["coordinator"]["followers"])) == ("coordinator", 1)
        assert [engine["state"] for engine in own["coordinator"]["engines"]] == ["open"]

        async def followed() -> bool:
            return bool(((await report_of(second))["coordinator"] or {}).get("followers"))

        await until(followed, "the other one knows of its coordinator")
        known = (await report_of(second))["coordinator"]
        assert (known["url"], known["fence"]) == (first.url, own["coordinator"]["fence"])
        await cluster.stop(first)
        await until(lambda: second.role == "coordinator", "the other one decides")
        assert (await report_of(second))["coordinator"]["fence"] > known["fence"]


async def test_a_call_that_is_sent_on_ends_with_its_client(
    postgres: PostgresServer, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole response, under an agent's key: its engine stops, its place is free again, and it is recorded as abandoned."""
    monkeypatch.setattr(generation, "WHOLE_INTERVAL", 1)
    key, store = "the-key-of-the-agent", postgres_store(postgres)
    given: dict[str, Any] = {
        "agents": {"a": {"key": key}},
        "calls": {"grace_s": 0.1},
        "limits": {"agent": {"calls": 1}},
    }
    async with run_cluster(store, tiny_model, tmp_path, **given) as cluster:
        engine, limits = cluster.engines[0], cluster.coordinator.services.limits
        engine.hold_after(1)
        call = asyncio.create_task(cluster.followers[0].chat(key))
        running = cluster.coordinator.services.episodes.live
        await until(lambda: any(c.call.turn.ids for live in running() for c in live.calls), "a token is here")
        assert (engine.running, engine.held) == (1, 1)
        assert limits.running == 1
        call.cancel()
        await until(lambda: engine.running == limits.running == 0, "the engine and the place are free")
        engine.release()
        async with cluster.admin() as admin:
            (episode,) = await admin.episodes()

            async def recorded() -> bool:
                return bool((await admin.episode(episode["id"]))["calls"])

            await until(recorded, "the call is recorded, once `grace_s` is over")
            calls = (await admin.episode(episode["id"]))["calls"]
        assert [call["finish_reason"] for call in calls] == ["abandoned"]
        assert (await cluster.followers[0].chat(key)).status_code == 200


async def test_calls_of_every_member_go_where_the_calls_of_all_leave_room(
    postgres: PostgresServer, tiny_model: Path, tmp_path: Path
) -> None:
    """The coordinator's call is in the first engine; the follower, which has none in either, takes the other for its own.

    The coordinator leaves while the follower's calls run, and they end all the same.
    """
    async with run_cluster(postgres_store(postgres), tiny_model, tmp_path, engines=2) as cluster:
        first, second = cluster.members
        for engine in cluster.engines:
            engine.set_faults({"endless": True, "hold_after": 2})
        async with cluster.admin(first) as admin:
            keys = [(await admin.open_episode(f"t{i}", mode="eval")).api_key for i in range(3)]
        filling = asyncio.create_task(first.chat(keys[0], max_tokens=8))
        await until(lambda: cluster.engines[0].held == 1, "the coordinator's call is in the first engine")

        def known() -> bool:
            placement = second.services.role._placements.get("demo")
            return placement is not None and placement.reactor._engines.open["demo-0"].running == 1

        await until(known, "the follower knows of it")
        calls = [asyncio.create_task(second.chat(key, max_tokens=8)) for key in keys[1:]]
        await until(lambda: [engine.held for engine in cluster.engines] == [2, 1], "it is in the other")
        stopping = asyncio.create_task(cluster.stop(first))
        await until(lambda: second.role == "coordinator", "the other one decides")
        for engine in cluster.engines:
            engine.set_faults({"endless": True, "hold_after": None})
        assert [(await call).status_code for call in calls] == [200, 200]
        await stopping
        filling.cancel()
        await asyncio.wait({filling})
