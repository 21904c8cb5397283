"""Weight updates behind open streams. The fake engine's tokens say which weights sampled them, and after which context."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.harness.agents import agent
from tests.harness.gateways import faults, run_gateway, running, settings_for
from tests.harness.records import check_everything, check_sampled_by_the_fake, nodes_of
from tests.harness.scripted import USER
from tests.harness.waiting import until


async def test_streams_cross_three_updates_and_every_token_is_of_its_version(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path, engine={})) as gateway:
        await faults(gateway, delay_s=0.05)
        done = asyncio.Event()
        agents = [asyncio.create_task(agent(gateway, done, i), name=f"agent-{i}") for i in range(32)]
        for version in (1, 2, 3):
            enough = gateway.engine.sampled + 150
            await until(
                lambda enough=enough: gateway.engine.running >= 24 and gateway.engine.sampled >= enough,
                "streams are open, and have sampled under this version",
                30,
            )
            record = await gateway.admin.publish(version, str(versions[version]), wait_s=30)
            assert record["state"] == "live"
            (report,) = record["report"]
            assert report["probe"]["verdict"] == "passed"
            assert report["failure"] == ""
            assert {"abort", "settle", "load", "resume", "probe", "label"} <= report["seconds"].keys()
            assert report["streams"] >= 20
        done.set()
        crossed = await check_everything(gateway, versions, list(await asyncio.gather(*agents)))
        assert crossed >= 20
        status = await gateway.admin.status()
        assert (status["version"], status["updates"]) == (3, 3)
        assert status["streams_across_updates"] >= 60
        assert gateway.engine.label == "3"


async def test_a_whole_reply_crosses_an_update_too(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        await faults(gateway, delay_s=0.03)
        opened = [await gateway.open(f"task-{i}", mode="eval") for i in range(8)]
        calls = [asyncio.create_task(gateway.chat(h, max_tokens=60), name=e) for e, h in opened]
        await until(lambda: gateway.engine.sampled >= 16, "every call has sampled something")
        await faults(gateway, delay_s=0.5)  # none is over before the update, however slow the machine is
        await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        await faults(gateway, delay_s=0.0)
        answers = await asyncio.gather(*calls)
        counts = [[answer.json()["usage"]["completion_tokens"]] for answer in answers]
        agents = list(zip([e for e, _ in opened], counts, strict=True))
        assert await check_everything(gateway, versions, agents) >= 1


async def test_a_version_that_an_engine_does_not_take_leaves_it_with_the_one_before(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    """Nobody can restart this engine: it says that it has loaded the weights, twice, and has not."""
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        await faults(gateway, stale_reload=True)
        record = await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        assert (record["state"], record["bad"]) == ("failed", True)
        assert "does not run version 1" in record["why"]
        assert record["report"][0]["probe"]["verdict"] == "failed"
        status = await gateway.admin.status()
        assert status["version"] == 0
        assert (status["engines"][0]["state"], status["engines"][0]["version"]) == ("open", 0)
        assert (await gateway.http.get("/readyz")).status_code == 200
        episode, headers = await gateway.open("goes on")
        assert (await gateway.chat(headers, max_tokens=8)).status_code == 200
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], {0: tiny_model.resolve()})


async def test_an_engine_that_can_load_nothing_serves_nobody_until_it_can(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    """Not even the version before: so nothing is known against the new one."""
    values = settings_for(tiny_model, tmp_path, queue={"max_wait_s": 0.5}, engine={"max_restarts": 1})
    async with run_gateway(values) as gateway:
        await faults(gateway, fail_load=True)
        record = await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        assert (record["state"], record["bad"]) == ("failed", False)
        assert "load failed (fault)" in record["why"]
        status = await gateway.admin.status()
        assert status["version"] == 0
        assert status["engines"][0]["state"] == "quarantined"
        episode, headers = await gateway.open("waits")
        for stream in (False, True):
            answer = await gateway.chat(headers, stream=stream)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_engine"
            assert int(answer.headers["retry-after"]) >= 1
        assert await nodes_of(gateway, episode) == []
        assert (await gateway.http.get("/readyz")).status_code == 503
        assert (await gateway.http.get("/healthz")).status_code == 200

        await faults(gateway, fail_load=False)
        assert (await gateway.admin.publish(1, str(versions[1]), wait_s=30))["state"] == "live"
        assert (await gateway.chat(headers, max_tokens=8)).status_code == 200
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], versions)


@pytest.mark.parametrize("fault", [{"stale_reload": True}, {"fail_load": True}, {"logprob_noise": 1.0}])
async def test_a_wrong_engine_is_quarantined_and_restarted_and_streams_go_on(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path], fault: dict[str, Any]
) -> None:
    values = settings_for(tiny_model, tmp_path, engine={"args": ["--delay-s", "0.02"]})
    async with run_gateway(values, in_process=False) as gateway:
        done = asyncio.Event()
        agents = [asyncio.create_task(agent(gateway, done, i), name=f"agent-{i}") for i in range(6)]
        before = (await gateway.admin.status())["engines"][0]["pid"]

        async def streaming() -> bool:
            return await running(gateway) >= 4

        await until(streaming, "streams are open")
        if "logprob_noise" not in fault:
            await faults(gateway, **fault)
        else:
            done.set()
            finished = await asyncio.gather(*agents)
            await faults(gateway, **fault)
        record = await gateway.admin.publish(1, str(versions[1]), wait_s=60)
        done.set()
        finished = await asyncio.gather(*agents)
        assert record["state"] == "live"
        (report,) = record["report"]
        assert report["failure"]
        assert "launch" in report["seconds"]
        assert report["probe"]["verdict"] == "passed"
        engine = (await gateway.admin.status())["engines"][0]
        assert (engine["state"], engine["version"], engine["restarts"]) == ("open", 1, 1)
        assert engine["pid"] != before
        await check_everything(gateway, versions, list(finished))
        episode, headers = await gateway.open("after", mode="eval")
        assert (await gateway.chat(headers, max_tokens=8)).status_code == 200
        nodes = await nodes_of(gateway, episode)
        assert nodes[-1]["versions"][0][0] == 1
        check_sampled_by_the_fake(nodes, nodes[-1], versions)


async def test_nothing_is_sampled_while_an_engine_is_held_and_streams_stay_open(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = settings_for(tiny_model, tmp_path, server={"keep_alive_s": 0.05})
    async with run_gateway(values) as gateway:
        slot = gateway.slot
        slot.state = "held"
        _, headers = await gateway.open("task", mode="eval")
        body = {"model": "m", "messages": [USER], "stream": True, "max_tokens": 4}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            comments = [line async for line in _first(lines, 6)]
            assert set(comments) == {": keep-alive", ""}
            assert gateway.engine.running == 0
            assert (await gateway.admin.status())["waiting_calls"] == 1
            gateway.let_in()
            rest = [line async for line in lines]
        assert answer.status_code == 200
        assert "data: [DONE]" in rest


async def _first(lines: Any, count: int) -> Any:
    for _ in range(count):
        yield await anext(lines)


async def test_more_calls_than_may_wait_are_refused_early(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(tiny_model, tmp_path, queue={"max_waiting": 2})
    async with run_gateway(values) as gateway:
        slot = gateway.slot
        slot.state = "held"
        _, headers = await gateway.open("task", mode="eval")
        waiting = [asyncio.create_task(gateway.chat(headers, max_tokens=2), name=f"{i}") for i in range(2)]
        await until(lambda: gateway.model.pool.waiting == 2, "two calls wait")
        refused = await gateway.chat(headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        gateway.let_in()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
