"""Calls that the control program places: versions side by side, calls that move, a program that has stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.harness.agents import finished, start_agents, start_held
from tests.harness.barrier import arrived, release
from tests.harness.gateways import RunningGateway, run_gateway, slots, two_engines
from tests.harness.records import check_everything, check_sampled_by_the_fake, nodes_of
from tests.harness.waiting import until


def of_version(gateway: RunningGateway, version: int) -> list[Any]:
    return [slot for slot in slots(gateway) if slot.state == "open" and slot.version == version]


async def one_pulls(gateway: RunningGateway, weights: Path) -> tuple[Any, Any]:
    """Publish version 1 while all calls are held; return the engine that has pulled it, and the one that still has calls."""
    assert all(slot.streams >= 2 for slot in slots(gateway))
    record = await gateway.admin.publish(1, str(weights), wait_s=60)
    assert record["state"] == "live"
    (new,), (old,) = of_version(gateway, 1), of_version(gateway, 0)
    await release(gateway, new)
    assert old.streams
    return new, old


async def turns_of(gateway: RunningGateway, episode: str) -> list[dict[str, Any]]:
    return [node for node in await nodes_of(gateway, episode) if node["sampled"]]


async def check_all(gateway: RunningGateway, versions: dict[int, Path], results: list[Any]) -> set[int]:
    """Check that nothing is lost, doubled or mislabeled; return the versions that sampled. A turn may go back to an older one."""
    sampled: set[int] = set()
    for episode, counts in results:
        nodes = await nodes_of(gateway, episode)
        turns = [node for node in nodes if node["sampled"]]
        assert [len(turn["ids"]) for turn in turns] == counts, "received is recorded"
        for turn in turns:
            assert turn["mask_reason"] == ""
            check_sampled_by_the_fake(nodes, turn, versions)
            sampled |= {version for version, _ in turn["versions"]}
    return sampled


@pytest.mark.parametrize("rule", ["gain", pytest.param("cached", marks=pytest.mark.long)])
async def test_an_engine_that_pulls_later_goes_on_with_the_calls_that_it_may_sample(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path], rule: str
) -> None:
    """One of two busy engines loads version 1; new episodes go there alone, until the other has nothing to do."""
    values = two_engines(tiny_model, tmp_path, update={"order": "pull"}, routing={"rule": rule})
    async with run_gateway(values, in_process=False) as gateway:
        agents, done = await start_held(gateway, 6, 2)
        new, old = await one_pulls(gateway, versions[1])
        for i in range(4):
            episode, headers = await gateway.open(f"young-{i}", mode="eval")
            assert (await gateway.chat(headers, max_tokens=8)).status_code == 200
            (turn,) = await turns_of(gateway, episode)
            assert turn["versions"] == [[1, len(turn["ids"])]]
            (call,) = (await gateway.admin.episode(episode))["calls"]
            assert call["engine"] == new.name
        assert (new.version, old.version) == (1, 0), "the other is busy, and stays as it is"
        await release(gateway, old)
        assert 0 in await check_all(gateway, versions, await finished(agents, done))
        await until(lambda: len(of_version(gateway, 1)) == 2, "the other has pulled")


async def test_a_call_that_no_open_engine_may_sample_waits_for_one_that_pulls(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    """The one engine with the newest version dies; the other is busy with older calls, and pulls all the same."""
    update = {"order": "pull"}
    values = two_engines(tiny_model, tmp_path, update=update, engine={"max_restarts": 0})
    async with run_gateway(values, in_process=False) as gateway:
        agents, done = await start_held(gateway, 4, 2)
        new, old = await one_pulls(gateway, versions[1])
        episode, headers = await gateway.open("young", mode="eval")
        gateway.services.coordinator.host.report_lost("demo", new.name, "by a test")
        young = asyncio.create_task(gateway.chat(headers, max_tokens=8), name="young")
        await until(lambda: old.version == 1, "it has pulled")
        await release(gateway, old)
        assert (await young).status_code == 200
        (turn,) = await turns_of(gateway, episode)
        assert {version for version, _ in turn["versions"]} == {1}
        await check_all(gateway, versions, await finished(agents, done))


async def test_calls_move_out_of_a_crowded_engine_and_lose_no_token(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    """One engine samples two calls at a time and has six, none of which ends; then another opens."""
    values = two_engines(tiny_model, tmp_path, routing={"migrate": True})
    async with run_gateway(values, in_process=False) as gateway:
        first, second = slots(gateway)
        await gateway.fake("faults", first, slots=2, hold_after=2)
        await gateway.fake("faults", second, hold_after=2)
        second.hold()
        gateway.model.pool.notify()
        agents, done = start_agents(gateway, 6)
        await arrived(gateway, 2, first)
        await until(lambda: first.streams == 6, "all are in the first")
        second.confirm(second.version)
        gateway.model.pool.notify()
        await until(lambda: second.streams >= 2, "calls have moved")
        await release(gateway)
        results = await finished(agents, done)
        await check_everything(gateway, versions, results)
        calls = [c for episode, _ in results for c in (await gateway.admin.episode(episode))["calls"]]
        assert any(call["pauses"] for call in calls)
        assert not any(call["pauses"] > 3 for call in calls), "to and fro"


async def test_calls_continue_when_the_control_program_has_stopped(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    """The control program has stopped, by a defect: engines that are open are used, and calls that wait get them."""
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        first, second = slots(gateway)
        first.hold()
        second.hold()
        _, headers = await gateway.open(mode="eval")
        waiting = asyncio.create_task(gateway.chat(headers, max_tokens=4), name="waiting")
        await until(lambda: gateway.model.pool.waiting == 1, "it waits")
        driver = gateway.services.coordinator.host._driver
        driver.cancel()
        await asyncio.wait({driver})
        second.confirm(0)
        later = asyncio.create_task(gateway.chat(headers, max_tokens=4), name="later")
        assert (await later).status_code == 200
        assert (await waiting).status_code == 200


async def test_the_speed_of_engines_is_shown(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:

        async def seen() -> bool:
            engines = (await gateway.http.get("/admin/v1/engines")).json()["engines"]
            return [engine["speed"] is not None for engine in engines] == [True, True]

        await until(seen, "both were looked at")
        (engine, _) = (await gateway.http.get("/admin/v1/engines")).json()["engines"]
        assert engine["speed"]["error"] is None
        assert engine["speed"]["s_per_batch"] == gateway.settings.routing.engine_prior.s_per_batch
        page = (await gateway.http.get("/metrics")).text
        assert 'headgate_engine_step_seconds{coefficient="s_per_batch",engine="demo-0",model="demo"}' in page


@pytest.mark.parametrize("group_version", [pytest.param("newest", marks=pytest.mark.long), "engine"])
async def test_an_engine_that_lags_gets_new_groups_if_its_version_is_their_min_version(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path], group_version: str
) -> None:
    """The engine with the newest version has more to do than the other, which both groups could be sampled by."""
    routing = {"rule": "cached", "group_version": group_version}
    staleness = {"batch": 2, "eta": 1, "min_members": 1}
    update = {"order": "pull"}
    values = two_engines(tiny_model, tmp_path, update=update, routing=routing, staleness=staleness)
    async with run_gateway(values, in_process=False) as gateway:
        agents, done = await start_held(gateway, 6, 2)
        new, old = await one_pulls(gateway, versions[1])
        await gateway.fake("faults", new, hold_after=2)
        waiting = []
        for i in range(7):  # of V = 1, so that they can be in the newer one alone
            _, headers = await gateway.open(f"young-{i}", mode="eval")
            waiting.append(asyncio.create_task(gateway.chat(headers, max_tokens=8), name=f"young-{i}"))
        await until(lambda: new.streams >= 7 > old.streams, "the newer one has more to do")
        opened = await gateway.admin.open_episode("trained", group_id="g", group_size=1)
        assert opened.version == (0 if group_version == "engine" else 1)
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        call = asyncio.create_task(gateway.chat(headers, max_tokens=8), name="trained")
        await until(lambda: len(gateway.model.pool.calls) >= 14, "it is in an engine, or waits for one")
        await release(gateway, old, new)
        assert [(await task).status_code for task in (call, *waiting)] == [200] * 8
        (turn,) = await turns_of(gateway, opened.episode_id)
        (used,) = (await gateway.admin.episode(opened.episode_id))["calls"]
        assert used["engine"] == (old.name if group_version == "engine" else new.name)
        assert min(version for version, _ in turn["versions"]) == opened.version
        await check_all(gateway, versions, await finished(agents, done))
