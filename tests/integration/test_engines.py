"""Several engines behind one gateway: updated in either mode, killed, drained, added, and calls that move between them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.engines import process
from headgate.processes.child import LocalProcess
from tests.harness.agents import finished, start_agents, start_held
from tests.harness.barrier import arrived, hold_after, release, share
from tests.harness.gateways import RunningGateway, run_gateway, settings_for, slots, two_engines
from tests.harness.records import check_everything, check_sampled_by_the_fake, lasting, nodes_of
from tests.harness.waiting import turns, until

SEED = 7


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_two_engines_load_each_version_and_every_token_is_of_its_own(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path], mode: str
) -> None:
    values = two_engines(tiny_model, tmp_path, update={"mode": mode, "order": "rolling"})
    async with run_gateway(values, in_process=False) as gateway:
        for slot in slots(gateway):
            await gateway.fake("faults", slot, lag_s=0.03, endless=True)
        await hold_after(gateway, 2)
        agents, done = start_agents(gateway, 6)
        for version in (1, 2, 3):
            await hold_after(gateway, 2 * version)
            await arrived(gateway, 6)
            record = await gateway.admin.publish(version, str(versions[version]), wait_s=600)
            assert record["state"] == "live"
            assert {report["engine"] for report in record["report"]} == {"demo-0", "demo-1"}
            steps = {"freeze"} if mode == "keep" else {"abort", "settle", "load", "resume", "probe", "label"}
            for report in record["report"]:
                assert (report["failure"], report["probe"]["verdict"]) == ("", "passed")
                assert steps <= report["seconds"].keys()
            assert [slot.version for slot in slots(gateway)] == [version, version]
            assert sum(report["streams"] for report in record["report"]) >= 6, "more if some moved between"
        done.set()
        await release(gateway)
        results = await finished(agents, done)
        assert [counts for _, counts in results] == [[60]] * 6
        assert await check_everything(gateway, versions, results, endless=True) == 18, "each in each update"
        status = await gateway.admin.status()
        assert (status["version"], status["updates"]) == (3, 3)
        assert status["streams_across_updates"] >= 18
        states = [await gateway.fake("state", slot) for slot in slots(gateway)]
        assert [state["stale_hits"] for state in states] == [0, 0]


async def test_rolling_leaves_an_engine_open(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    async with run_gateway(
        two_engines(tiny_model, tmp_path, update={"order": "rolling"}), in_process=False
    ) as gateway:
        open_engines: list[int] = []
        watcher = asyncio.create_task(watch_open(gateway, open_engines), name="watcher")
        await gateway.admin.publish(1, str(versions[1]), wait_s=600)
        watcher.cancel()
        assert min(open_engines) == 1


async def watch_open(gateway: RunningGateway, seen: list[int]) -> None:
    """Count the open engines whenever that may have changed."""
    while True:
        seen.append(sum(slot.state == "open" for slot in slots(gateway)))
        await turns(1)


def hold_restarts(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No engine is started before the event is set: otherwise calls that leave one might find it well again."""
    moved, launch = asyncio.Event(), process.launch

    async def launch_later(*engine: Any) -> LocalProcess:
        await moved.wait()
        return await launch(*engine)

    monkeypatch.setattr(process, "launch", launch_later)
    return moved


async def test_calls_go_on_elsewhere_when_their_engine_is_killed(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        moved = hold_restarts(monkeypatch)
        agents, done = await start_held(gateway, 8, 2)
        first, second = slots(gateway)
        assert (first.streams, second.streams) == (4, 4)
        pid = first.describe("demo")["pid"]
        os.killpg(pid, signal.SIGKILL)
        await arrived(gateway, 8, second)
        assert second.streams == 8
        moved.set()
        await until(
            lambda: first.state == "open" and first.describe("demo")["pid"] not in (pid, None),
            "it is started again",
        )
        await release(gateway)
        await check_everything(gateway, versions, await finished(agents, done))


async def test_a_silent_engine_is_lost_and_its_calls_go_on(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        moved = hold_restarts(monkeypatch)
        agents, done = await start_held(gateway, 6, 2)
        first, second = slots(gateway)
        assert (first.streams, second.streams) == (3, 3)
        calls = [run.call for run in first.runs.values()]
        await until(lambda: all(len(call.turn.ids) == 2 for call in calls), "their tokens are here")
        first.last_token_at -= 3600.0
        await arrived(gateway, 6, second)
        moved.set()
        await until(lambda: first.restarts == 1 and first.state == "open", "the silent engine is restarted")
        assert second.restarts == 0
        await release(gateway)
        await check_everything(gateway, versions, await finished(agents, done))


async def test_an_engine_that_fails_its_health_checks_is_lost(tiny_model: Path, tmp_path: Path) -> None:
    values = two_engines(tiny_model, tmp_path, engine={"health_s": 0.05})
    async with run_gateway(values, in_process=False) as gateway:
        await gateway.fake("faults", sick=True)
        await until(lambda: slots(gateway)[0].restarts == 1, "it is restarted")
        await until(lambda: slots(gateway)[0].state == "open", "it is well again")
        assert slots(gateway)[1].restarts == 0


@pytest.mark.parametrize("fault", ["fail_after", "drop_after"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_in_the_middle_costs_nothing(
    gateway: RunningGateway, tiny_model: Path, stream: bool, fault: str
) -> None:
    """The engine fails with an error or a broken connection. Whole responses arrive in larger pieces; an unfinished piece is
    lost.
    """
    await gateway.fake("faults", **{fault: 4 if stream else 20})
    episode, headers = await gateway.open()
    response = await gateway.chat(headers, max_tokens=10 if stream else 40, stream=stream)
    assert response.status_code == 200
    nodes = await nodes_of(gateway, episode)
    check_sampled_by_the_fake(nodes, nodes[-1], {0: tiny_model.resolve()})
    assert gateway.engine is not None
    assert gateway.engine.sampled > len(nodes[-1]["ids"]), "it has failed"


async def test_an_engine_can_be_added_and_removed_under_load(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(
        tiny_model, tmp_path, engine={"count": 1}, update={"order": "rolling"}, routing={"rule": "cached"}
    )
    async with run_gateway(values, in_process=False) as gateway:
        (first,) = slots(gateway)
        agents, done = await start_held(gateway, 8, 2)
        added = await gateway.http.post("/admin/v1/engines?wait=600", json={"name": "extra"})
        assert (added.status_code, added.json()["state"], added.json()["version"]) == (200, "open", 0)
        extra = gateway.model.pool.slots["extra"]
        await share(gateway, 8, first, extra)
        calls = gateway.model.pool.calls
        await until(lambda: all(len(call.turn.ids) >= 2 for call in calls.values()), "tokens have been read")
        await gateway.admin.publish(1, str(versions[1]), wait_s=600)
        assert extra.version == 1
        await arrived(gateway, 8)
        removed = await gateway.http.delete("/admin/v1/engines/demo-0?wait=600")
        assert removed.json()["removed"] is True
        assert list(gateway.model.pool.slots) == ["extra"]
        await arrived(gateway, 8)
        await release(gateway)
        assert await check_everything(gateway, versions, await finished(agents, done)) == 8
        engines = (await gateway.http.get("/admin/v1/engines")).json()["engines"]
        assert [(e["name"], e["state"]) for e in engines] == [("extra", "open")]


async def test_wrong_engines_are_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        posts: list[tuple[dict[str, Any], int, str]] = [
            ({"name": "demo-0", "url": "http://127.0.0.1:1"}, 409, "engine_exists"),
            ({}, 400, "url_needed"),
            ({"url": "ftp://x"}, 400, "invalid_value"),
            ({"model": "unknown", "url": "http://127.0.0.1:1"}, 404, "model_not_found"),
            ({"nam": "x"}, 400, "unknown_parameter"),
        ]
        for body, status, code in posts:
            response = await gateway.http.post("/admin/v1/engines", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), body
        dead = await gateway.http.post("/admin/v1/engines?wait=600", json={"url": "http://127.0.0.1:1"})
        assert dead.json()["state"] == "quarantined"
        assert "127.0.0.1:1" in dead.json()["reason"] or "connect" in dead.json()["reason"]
        response = await gateway.http.delete("/admin/v1/engines/nobody")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "no_engine")
        _, headers = await gateway.open()
        assert (await gateway.chat(headers, max_tokens=2)).status_code == 200, "the good engine still serves"


async def call_of(gateway: RunningGateway, episode: str) -> dict[str, Any]:
    """The episode's call, once it stands at the barrier."""
    await arrived(gateway, 1)
    calls = (await gateway.http.get("/admin/v1/calls")).json()["calls"]
    (call,) = [call for call in calls if call["episode_id"] == episode]
    return call


async def test_a_moved_call_samples_the_same(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        episode, headers = await gateway.open(mode="eval")
        await hold_after(gateway, 3)
        question = lasting(gateway.settings.model, renderer=gateway.model.renderer)
        task = asyncio.create_task(
            gateway.chat(headers, max_tokens=120, stream=True, messages=question), name="call"
        )
        for tokens in (16, 5, 20, 12):
            call = await call_of(gateway, episode)
            (other,) = [slot for slot in slots(gateway) if slot.name != call["engine"]]
            await hold_after(gateway, tokens, other)
            response = await gateway.http.post(
                f"/admin/v1/calls/{call['call_id']}/move", json={"engine": other.name}
            )
            assert response.status_code == 200
            await arrived(gateway, 1, other)
        await release(gateway)
        assert (await task).status_code == 200
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], {0: tiny_model.resolve()})
        (record,) = (await gateway.admin.episode(episode))["calls"]
        assert record["pauses"] == 4


async def test_a_waiting_call_can_be_sent_to_an_engine(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        first, second = slots(gateway)
        first.hold()
        second.hold()
        episode, headers = await gateway.open(mode="eval")
        task = asyncio.create_task(gateway.chat(headers, max_tokens=4), name="call")
        await until(lambda: gateway.model.pool.waiting == 1, "it waits")
        (call,) = (await gateway.http.get("/admin/v1/calls")).json()["calls"]
        assert call["engine"] is None
        refused = await gateway.http.post(
            f"/admin/v1/calls/{call['call_id']}/move", json={"engine": "demo-1"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "engine_not_open")
        second.confirm(0)
        gateway.model.pool.notify()
        assert (await task).status_code == 200
        (record,) = (await gateway.admin.episode(episode))["calls"]
        assert record["engine"] == "demo-1"
        first.confirm(0)


async def seeded(gateway: RunningGateway) -> tuple[str, asyncio.Task[Any]]:
    """An episode with a seeded call that stops after 20 tokens."""
    await hold_after(gateway, 20)
    episode, headers = await gateway.open(mode="eval")
    question = lasting(gateway.settings.model, SEED, gateway.model.renderer)
    request = gateway.chat(headers, seed=SEED, max_tokens=200, messages=question)
    return episode, asyncio.create_task(request, name="seeded")


async def test_a_seeded_call_stays_in_its_engine_across_an_update(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(tiny_model, tmp_path, update={"order": "rolling"})
    async with run_gateway(values, in_process=False) as gateway:
        episode, task = await seeded(gateway)
        call = await call_of(gateway, episode)
        assert call["pinned"]
        other = next(slot.name for slot in slots(gateway) if slot.name != call["engine"])
        refused = await gateway.http.post(f"/admin/v1/calls/{call['call_id']}/move", json={"engine": other})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "call_pinned")
        record = await gateway.admin.publish(1, str(versions[1]), wait_s=600)
        report = next(r for r in record["report"] if r["engine"] == call["engine"])
        assert report["pinned"] == 1
        assert {"handback", "freeze"} <= report["seconds"].keys()
        await release(gateway)
        assert (await task).status_code == 200
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], versions, seed=SEED)
        assert nodes[-1]["versions"] == [[0, 20], [1, len(nodes[-1]["ids"]) - 20]]
        (stored,) = (await gateway.admin.episode(episode))["calls"]
        assert (stored["pauses"], stored["engine"]) == (0, call["engine"])


async def test_a_seeded_call_whose_engine_dies_is_sampled_again_from_its_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        episode, task = await seeded(gateway)
        call = await call_of(gateway, episode)
        os.killpg(gateway.model.pool.slots[call["engine"]].describe("demo")["pid"], signal.SIGKILL)
        other = next(slot for slot in slots(gateway) if slot.name != call["engine"])
        await arrived(gateway, 1, other)
        await release(gateway, other)
        response = await task
        assert response.status_code == 200
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], {0: tiny_model.resolve()}, seed=SEED)
        assert len(nodes) == 2, "what was sampled before the death is nowhere"


async def test_tokens_that_the_engine_never_accounted_for_carry_an_interval_and_are_masked(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(tiny_model, tmp_path, update={"mode": "keep", "order": "rolling"})
    async with run_gateway(values, in_process=False) as gateway:
        for slot in slots(gateway):
            await gateway.fake("faults", slot, endless=True, hold_after=5)
        episode, headers = await gateway.open(mode="eval")
        task = asyncio.create_task(gateway.chat(headers, max_tokens=200, stream=True), name="call")
        call = await call_of(gateway, episode)
        slot = gateway.model.pool.slots[call["engine"]]
        await gateway.admin.publish(1, str(versions[1]), wait_s=600)
        await hold_after(gateway, 9, slot)
        await until(lambda: len(gateway.model.pool.calls[call["call_id"]].turn.ids) == 9, "all is received")
        os.killpg(slot.describe("demo")["pid"], signal.SIGKILL)
        await release(gateway, *[other for other in slots(gateway) if other is not slot])
        assert (await task).status_code == 200
        nodes = await nodes_of(gateway, episode)
        turn = nodes[-1]
        assert turn["versions"] == [[0, 5], [0, 4, 1], [1, 191]], "either version may have sampled the four"
        assert turn["flags"] == [""] * 5 + ["UNCONFIRMED"] * 4 + [""] * 191


async def test_an_episodes_turns_go_where_their_prefix_is_cached(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        used = []
        for i in range(4):
            episode, headers = await gateway.open(f"task-{i}", mode="eval")
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {i}"}]
            for _ in range(4):
                response = await gateway.chat(headers, messages=messages, max_tokens=8)
                reply = response.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
            calls = (await gateway.admin.episode(episode))["calls"]
            used.append({call["engine"] for call in calls})
        assert all(len(engines) == 1 for engines in used)
        hits = [(await gateway.fake("state", slot))["prefix_hits"] for slot in slots(gateway)]
        assert sum(hits) > 0


async def test_a_recorded_run_is_replayed_bit_for_bit(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    from scheduler.program import PROGRAMS
    from scheduler.reactor import replay

    values = two_engines(tiny_model, tmp_path)
    async with run_gateway(values, in_process=False) as gateway:
        first, second = slots(gateway)
        agents, done = await start_held(gateway, 4, 2)
        await gateway.admin.publish(1, str(versions[1]), wait_s=600)
        await arrived(gateway, 4)
        os.killpg(first.describe("demo")["pid"], signal.SIGKILL)
        await arrived(gateway, 4, second)
        await until(lambda: first.restarts == 1 and first.state == "open", "it is back")
        await gateway.admin.publish(2, str(versions[2]), wait_s=600)
        await release(gateway)
        await finished(agents, done)
    report = replay(tmp_path / "control.jsonl", PROGRAMS["control"])
    assert report.equal
    assert report.decisions > 20


async def test_calls_that_have_begun_are_never_refused_for_the_length_of_the_queue(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(tiny_model, tmp_path, engine={"count": 1}, queue={"max_waiting": 1})
    async with run_gateway(values, in_process=False) as gateway:
        await gateway.fake("faults", hold_after=2, hold_load=True)
        _, headers = await gateway.open(mode="eval")
        question = lasting(gateway.settings.model, renderer=gateway.model.renderer)
        calls = [
            asyncio.create_task(
                gateway.chat(headers, max_tokens=65, stream=True, messages=question), name="c"
            )
            for _ in range(6)
        ]
        await arrived(gateway, 6)
        await gateway.admin.publish(1, str(versions[1]))
        await until(lambda: gateway.model.pool.waiting == 6, "all wait for it")
        await gateway.fake("faults", hold_load=False)
        await release(gateway)
        assert [response.status_code for response in await asyncio.gather(*calls)] == [200] * 6
