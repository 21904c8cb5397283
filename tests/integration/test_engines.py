"""Several engines behind one gateway: updated in either mode, killed, drained, added, and calls that move between them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.fake import identity, next_token
from tests.harness.agents import finished, start_agents
from tests.harness.gateways import RunningGateway, run_gateway, settings_for, slots, two_engines
from tests.harness.records import STOP_TOKENS, check_everything, check_sampled_by_the_fake, nodes_of, path_to
from tests.harness.waiting import until

SEED = 7


async def streams(gateway: RunningGateway) -> int:
    return sum(slot.streams for slot in slots(gateway))


async def last(gateway: RunningGateway, delay_s: float = 0.5) -> None:
    """What runs in the engines lasts, however slow the machine is, until they are told of a shorter delay."""
    for slot in slots(gateway):
        await gateway.fake("faults", slot, delay_s=delay_s)


@pytest.mark.parametrize("order", ["rolling", "together"])
@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_two_engines_come_to_each_version_and_every_token_is_of_its_own(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path], mode: str, order: str
) -> None:
    values = two_engines(tiny_model, tmp_path, update={"mode": mode, "order": order})
    async with run_gateway(values, in_process=False) as gateway:
        for slot in slots(gateway):
            await gateway.fake("faults", slot, lag_s=0.03)
        agents, done = start_agents(gateway, 12)
        for version in (1, 2, 3):
            await until(lambda: all(slot.streams >= 3 for slot in slots(gateway)), "both work", 30)
            record = await gateway.admin.publish(version, str(versions[version]), wait_s=30)
            assert record["state"] == "live"
            assert {report["engine"] for report in record["report"]} == {"demo-0", "demo-1"}
            wanted = {"freeze"} if mode == "keep" else {"abort", "settle"}
            assert all(wanted <= report["seconds"].keys() for report in record["report"])
            assert [slot.version for slot in slots(gateway)] == [version, version]
        crossed = await check_everything(gateway, versions, await finished(agents, done))
        assert crossed >= 10
        states = [await gateway.fake("state", slot) for slot in slots(gateway)]
        assert [state["stale_hits"] for state in states] == [0, 0]


async def test_rolling_leaves_an_engine_open_and_together_leaves_none(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    for order, fewest in (("rolling", 1), ("together", 0)):
        values = two_engines(tiny_model, tmp_path / order, update={"order": order})
        async with run_gateway(values, in_process=False) as gateway:
            seen: list[int] = []
            watcher = asyncio.create_task(watch_open(gateway, seen), name="watcher")
            await gateway.admin.publish(1, str(versions[1]), wait_s=30)
            watcher.cancel()
            assert min(seen) == fewest


async def watch_open(gateway: RunningGateway, seen: list[int]) -> None:
    """How many engines are open, whenever that may have changed."""
    while True:
        seen.append(sum(slot.state == "open" for slot in slots(gateway)))
        await asyncio.sleep(0)


async def test_calls_go_on_elsewhere_when_their_engine_is_killed(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        agents, done = start_agents(gateway, 8)
        await until(lambda: all(slot.streams >= 2 for slot in slots(gateway)), "both work")
        pid = slots(gateway)[0].describe("demo")["pid"]
        os.killpg(pid, signal.SIGKILL)
        await until(lambda: slots(gateway)[0].state != "open", "the death is noticed")
        await until(lambda: slots(gateway)[1].streams >= 6, "the other takes over")
        await until(lambda: slots(gateway)[0].state == "open", "it is started again", 30)
        assert slots(gateway)[0].describe("demo")["pid"] != pid
        await check_everything(gateway, versions, await finished(agents, done))


async def test_a_silent_engine_is_lost_and_its_calls_go_on(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(tiny_model, tmp_path, engine={"stall_s": 0.7})
    async with run_gateway(values, in_process=False) as gateway:
        agents, done = start_agents(gateway, 6)
        await until(lambda: all(slot.streams >= 1 for slot in slots(gateway)), "both work")
        await gateway.fake("faults", stall=True)
        await until(lambda: slots(gateway)[0].restarts == 1, "the silent engine is restarted", 20)
        await check_everything(gateway, versions, await finished(agents, done))


async def test_an_engine_that_fails_its_health_checks_is_lost(tiny_model: Path, tmp_path: Path) -> None:
    values = two_engines(tiny_model, tmp_path, engine={"health_s": 0.05})
    async with run_gateway(values, in_process=False) as gateway:
        await gateway.fake("faults", sick=True)
        await until(lambda: slots(gateway)[0].restarts == 1, "it is restarted", 20)
        await until(lambda: slots(gateway)[0].state == "open", "it is well again", 20)
        assert slots(gateway)[1].restarts == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_errors_in_the_middle_costs_nothing(
    gateway: RunningGateway, tiny_model: Path, stream: bool
) -> None:
    """A whole answer comes in larger pieces, and a piece that the engine did not finish is lost with it."""
    await gateway.fake("faults", fail_after=4 if stream else 20)
    episode, headers = await gateway.open()
    answer = await gateway.chat(headers, max_tokens=10 if stream else 40, stream=stream)
    assert answer.status_code == 200
    nodes = await nodes_of(gateway, episode)
    check_sampled_by_the_fake(nodes, nodes[-1], {0: tiny_model.resolve()})


async def test_an_engine_can_be_added_and_removed_under_load(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(tiny_model, tmp_path, engine={"count": 1})
    async with run_gateway(values, in_process=False) as gateway:
        agents, done = start_agents(gateway, 8)
        added = await gateway.http.post("/admin/v1/engines?wait=20", json={"name": "extra"})
        assert (added.status_code, added.json()["state"], added.json()["version"]) == (200, "open", 0)
        await until(lambda: gateway.model.pool.slots["extra"].streams >= 2, "the new engine works")
        await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        assert gateway.model.pool.slots["extra"].version == 1
        removed = await gateway.http.delete("/admin/v1/engines/demo-0?wait=20")
        assert removed.json()["removed"] is True
        assert list(gateway.model.pool.slots) == ["extra"]
        await check_everything(gateway, versions, await finished(agents, done))
        engines = (await gateway.http.get("/admin/v1/engines")).json()["engines"]
        assert [(e["name"], e["state"]) for e in engines] == [("extra", "open")]


async def test_wrong_engines_are_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        posts: list[tuple[dict[str, Any], int, str]] = [
            ({"name": "demo-0", "url": "http://127.0.0.1:1"}, 409, "engine_exists"),
            ({}, 400, "url_needed"),
            ({"url": "ftp://x"}, 400, "invalid_value"),
            ({"model": "nobody", "url": "http://127.0.0.1:1"}, 404, "model_not_found"),
            ({"nam": "x"}, 400, "unknown_parameter"),
        ]
        for body, status, code in posts:
            answer = await gateway.http.post("/admin/v1/engines", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body
        dead = await gateway.http.post("/admin/v1/engines?wait=20", json={"url": "http://127.0.0.1:1"})
        assert dead.json()["state"] == "quarantined"
        assert "127.0.0.1:1" in dead.json()["reason"] or "connect" in dead.json()["reason"]
        answer = await gateway.http.delete("/admin/v1/engines/nobody")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_engine")
        _, headers = await gateway.open()
        assert (await gateway.chat(headers, max_tokens=2)).status_code == 200, "the good engine still serves"


async def call_of(gateway: RunningGateway, episode: str) -> dict[str, Any]:
    """The episode's running or waiting call, once it has sampled something."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        calls = (await gateway.http.get("/admin/v1/calls")).json()["calls"]
        found[:] = [c for c in calls if c["episode_id"] == episode and c["tokens"] > 2]
        return bool(found)

    await until(there, "the call runs")
    return found[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_can_be_moved_and_says_the_same(tiny_model: Path, tmp_path: Path, stream: bool) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        episode, headers = await gateway.open(mode="eval")
        rng = random.Random(3)
        task = asyncio.create_task(
            gateway.chat(headers, max_tokens=120, stream=stream, messages=long_question(gateway, 110)),
            name="call",
        )
        engines = []
        for _ in range(4):
            if task.done():
                break
            await asyncio.sleep(rng.random() * 0.1)
            call = await call_of(gateway, episode)
            other = next(slot.name for slot in slots(gateway) if slot.name != call["engine"])
            answer = await gateway.http.post(
                f"/admin/v1/calls/{call['call_id']}/move", json={"engine": other}
            )
            if answer.status_code == 404:
                break
            engines.append(other)
            await until(
                lambda other=other: task.done() or gateway.model.pool.slots[other].streams == 1,
                "it has moved",
            )
        assert (await task).status_code == 200
        assert engines
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], {0: tiny_model.resolve()})
        (record,) = (await gateway.admin.episode(episode))["calls"]
        assert record["pauses"] >= 1


async def test_a_waiting_call_can_be_sent_to_an_engine(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        first, second = slots(gateway)
        first.state = second.state = "held"
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


def long_question(gateway: RunningGateway, count: int, seed: int | None = None) -> list[dict[str, Any]]:
    """Messages whose reply, with this seed, has at least so many tokens: the fake engine goes by the length of the prompt."""
    model = gateway.settings.model.path
    assert model is not None
    for i in range(1, 1500):
        messages = [{"role": "user", "content": "x" * i}]
        prompt = gateway.model.renderer.render(messages, [])
        if not set(sampled_after(prompt, model, count, seed)) & set(STOP_TOKENS):
            return messages
    raise AssertionError("no such question")


async def seeded(gateway: RunningGateway, **body: Any) -> tuple[str, asyncio.Task[Any]]:
    """An episode with a seeded call that runs for a while."""
    episode, headers = await gateway.open(mode="eval")
    question = long_question(gateway, 80, SEED)
    request = gateway.chat(headers, seed=SEED, max_tokens=200, messages=question, **body)
    return episode, asyncio.create_task(request, name="seeded")


def sampled_after(prompt: list[int], model: Path, count: int, seed: int | None) -> list[int]:
    """What an engine that nobody disturbs samples."""
    context, sampled, weights = list(prompt), [], identity(str(model.resolve()))
    for _ in range(count):
        token, _ = next_token(weights, context, seed, STOP_TOKENS)
        context.append(token)
        sampled.append(token)
    return sampled


@pytest.mark.parametrize("stream", [False, True])
async def test_a_seeded_call_stays_in_its_engine_across_an_update(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path], stream: bool
) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        episode, task = await seeded(gateway, stream=stream)
        call = await call_of(gateway, episode)
        await last(gateway)
        assert call["pinned"]
        other = next(slot.name for slot in slots(gateway) if slot.name != call["engine"])
        refused = await gateway.http.post(f"/admin/v1/calls/{call['call_id']}/move", json={"engine": other})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "call_pinned")
        record = await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        report = next(r for r in record["report"] if r["engine"] == call["engine"])
        assert report["pinned"] == 1
        assert {"handback", "freeze"} <= report["seconds"].keys()
        await last(gateway, 0.0)
        assert (await task).status_code == 200
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], versions, seed=SEED)
        (stored,) = (await gateway.admin.episode(episode))["calls"]
        assert (stored["pauses"], stored["engine"]) == (0, call["engine"])


async def test_a_seeded_call_whose_engine_dies_is_begun_anew(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path), in_process=False) as gateway:
        episode, task = await seeded(gateway)
        call = await call_of(gateway, episode)
        await last(gateway)
        os.killpg(gateway.model.pool.slots[call["engine"]].describe("demo")["pid"], signal.SIGKILL)
        other = next(slot for slot in slots(gateway) if slot.name != call["engine"])
        await gateway.fake("faults", other, delay_s=0.0)
        answer = await task
        assert answer.status_code == 200
        nodes = await nodes_of(gateway, episode)
        turn = nodes[-1]
        assert turn["ids"] == sampled_after(path_to(nodes, turn), tiny_model, len(turn["ids"]), SEED)
        assert len(nodes) == 2, "what was sampled before the death is nowhere"


async def test_tokens_that_the_engine_never_accounted_for_carry_an_interval_and_are_masked(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(tiny_model, tmp_path, update={"mode": "keep"}, delay_s=0.03)
    async with run_gateway(values, in_process=False) as gateway:
        for slot in slots(gateway):
            await gateway.fake("faults", slot, endless=True)
        episode, headers = await gateway.open(mode="eval")
        task = asyncio.create_task(gateway.chat(headers, max_tokens=200, stream=True), name="call")
        call = await call_of(gateway, episode)
        slot = gateway.model.pool.slots[call["engine"]]
        await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        known = (await call_of(gateway, episode))["tokens"]
        await until(lambda: len(gateway.model.pool.calls[call["call_id"]].turn.ids) > known + 3, "it goes on")
        os.killpg(slot.describe("demo")["pid"], signal.SIGKILL)
        assert (await task).status_code == 200
        nodes = await nodes_of(gateway, episode)
        turn = nodes[-1]
        assert turn["versions"][0][0] == 0
        assert turn["versions"][1][::2] == [0, 1], "either version may have sampled these"
        assert turn["versions"][2][0] == 1
        first, unsure, _ = (span[1] for span in turn["versions"])
        assert [flag == "UNCONFIRMED" for flag in turn["flags"]] == [
            first <= i < first + unsure for i in range(len(turn["ids"]))
        ]


async def test_kept_caches_are_told_by_a_flag(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(tiny_model, tmp_path, update={"mode": "keep", "clear_cache": False}, delay_s=0.02)
    async with run_gateway(values, in_process=False) as gateway:
        question = long_question(gateway, 60)
        episode, headers = await gateway.open(mode="eval")
        task = asyncio.create_task(
            gateway.chat(headers, max_tokens=60, stream=True, messages=question), name="call"
        )
        await call_of(gateway, episode)
        await last(gateway)
        await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        await last(gateway, 0.0)
        assert (await task).status_code == 200
        nodes = await nodes_of(gateway, episode)
        (zero, before), (one, after) = nodes[-1]["versions"]
        assert (zero, one) == (0, 1)
        assert nodes[-1]["flags"] == [""] * before + ["STALE_KV"] * after
        assert (await gateway.chat(headers, max_tokens=2, messages=question)).status_code == 200
        states = [await gateway.fake("state", slot) for slot in slots(gateway)]
        assert [state["stale_hits"] for state in states] == [0, 0], "another salt for another version"


async def test_an_episodes_turns_go_where_their_prefix_is_cached(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(two_engines(tiny_model, tmp_path, delay_s=0), in_process=False) as gateway:
        used = []
        for i in range(4):
            episode, headers = await gateway.open(f"task-{i}", mode="eval")
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {i}"}]
            for _ in range(4):
                answer = await gateway.chat(headers, messages=messages, max_tokens=8)
                said = answer.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
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
        agents, done = start_agents(gateway, 4)
        await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        os.killpg(slots(gateway)[0].describe("demo")["pid"], signal.SIGKILL)
        await until(lambda: slots(gateway)[0].restarts == 1, "the death is noticed")
        await until(lambda: slots(gateway)[0].state == "open", "it is back", 30)
        await gateway.admin.publish(2, str(versions[2]), wait_s=30)
        await finished(agents, done)
    report = replay(tmp_path / "control.jsonl", PROGRAMS["control"])
    assert report.equal
    assert report.decisions > 20


async def test_calls_wait_a_moment_for_the_engine_that_gave_them_back(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    for patience, stay in ((30.0, True), (0.0, False)):
        values = two_engines(tiny_model, tmp_path / str(stay), update={"patience_s": patience}, delay_s=0.03)
        async with run_gateway(values, in_process=False) as gateway:
            question = long_question(gateway, 90)
            opened = [await gateway.open(f"task-{i}", mode="eval") for i in range(6)]
            calls = [
                asyncio.create_task(gateway.chat(h, max_tokens=95, stream=True, messages=question), name=e)
                for e, h in opened
            ]
            await until(lambda: all(slot.streams == 3 for slot in slots(gateway)), "each has its share")
            began = {run.call.call_id: slot.name for slot in slots(gateway) for run in slot.runs.values()}
            for slot in slots(gateway):
                await gateway.fake("faults", slot, load_s=0.2, delay_s=0.5)
            await gateway.admin.publish(1, str(versions[1]), wait_s=30)
            await last(gateway, 0.0)
            assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 6
            rows = [(await gateway.admin.episode(episode))["calls"][0] for episode, _ in opened]
            assert all(row["pauses"] >= 1 for row in rows)
            assert all(row["engine"] == began[row["id"]] for row in rows) == stay


async def test_calls_that_have_begun_are_never_refused_for_the_length_of_the_queue(
    tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    values = two_engines(tiny_model, tmp_path, 0.5, engine={"count": 1}, queue={"max_waiting": 1})
    async with run_gateway(values, in_process=False) as gateway:
        _, headers = await gateway.open(mode="eval")
        question = long_question(gateway, 60)
        calls = [
            asyncio.create_task(
                gateway.chat(headers, max_tokens=65, stream=True, messages=question), name="c"
            )
            for _ in range(6)
        ]
        await until(lambda: slots(gateway)[0].streams == 6, "all are in the engine")
        await gateway.fake("faults", load_s=0.3)
        await gateway.admin.publish(1, str(versions[1]), wait_s=30)
        await last(gateway, 0.0)
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 6
