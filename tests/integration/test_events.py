"""The stream of events over a running gateway: every event in order, once, for those who may see it, across restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.client import GatewayClient, GatewayRefused
from headgate.client.events import EventStream
from headgate.processes.ports import free_port
from tests.harness import programs
from tests.harness.gateways import RunningGateway, gateway_of, run_gateway, serve, settings_for
from tests.harness.waiting import LONG_S, result_of, until, within

STALENESS = {"batch": 1, "eta": 1, "min_members": 1}


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with run_gateway(settings_for(tiny_model, tmp_path, staleness=STALENESS)) as running:
        yield running


async def read(stream: EventStream, last: str) -> list[dict[str, Any]]:
    """Read a stream up to an event of this kind."""
    seen: list[dict[str, Any]] = []
    async with within(f"{last} is sent"):
        async for event in stream:
            seen.append(event)
            if event["kind"] == last:
                return seen
    raise AssertionError(f"the stream ended before {last}: {seen}")


async def stored(client: GatewayClient, **query: Any) -> list[dict[str, Any]]:
    """Return all stored events."""
    return [event async for event in client.events(**{"after": 0, "wait_s": 0, **query})]


async def train_once(gateway: RunningGateway, group: str = "g") -> str:
    """An episode that is opened, spoken in, rewarded, leased and acknowledged as trained; its id."""
    episode, headers = await gateway.open("task", group_id=group)
    (await gateway.chat(headers, max_tokens=4)).raise_for_status()
    await gateway.admin.reward(episode, 0.5, {"tests": 0.5})
    lease = await gateway.admin.lease("trainer")
    await gateway.admin.leased_groups(lease, wait_s=LONG_S)
    await gateway.admin.ack(lease, "checkpoint-1")
    await gateway.admin.post_step(1, {"loss": 0.25, "reward_mean": 0.5}, version=1)
    return episode


def of(events: Sequence[dict[str, Any]], *subjects: str) -> list[str]:
    return [event["kind"] for event in events if event["kind"].split(".")[0] in subjects]


async def test_the_events_of_an_episode_until_its_step_arrive_in_order(gateway: RunningGateway) -> None:
    watching = asyncio.create_task(read(gateway.admin.events(after=0), "trainer.step"))
    await until(lambda: gateway.services.events.watchers == 1, "the stream is open")
    episode = await train_once(gateway)
    seen = await result_of(watching, "the step is sent")
    assert of(seen, "episode", "group", "batch", "trainer") == [
        "episode.opened", "episode.admitted", "episode.closed", "episode.rewarded", "group.occupied", "batch.leased",
        "batch.acked", "group.trained", "trainer.step",
    ]  # fmt: skip
    by_kind = {event["kind"]: event for event in seen}
    assert by_kind["episode.closed"]["data"] == {
        "task_id": "task", "mode": "train", "version": 0, "reason": "rewarded", "reward": 0.5, "components": {"tests": 0.5},
    }  # fmt: skip
    for kind in ("episode.opened", "episode.closed"):
        assert (by_kind[kind]["episode"], by_kind[kind]["group"]) == (episode, "g")
    assert by_kind["batch.acked"]["data"]["checkpoint"] == "checkpoint-1"
    assert by_kind["trainer.step"]["data"] == {
        "step": 1,
        "version": 1,
        "figures": {"loss": 0.25, "reward_mean": 0.5},
    }
    assert seen == [event for event in await stored(gateway.admin) if event["id"] <= seen[-1]["id"]]


async def test_engines_make_events_when_they_open_and_are_removed(gateway: RunningGateway) -> None:
    opened = await read(gateway.admin.events(after=0, kinds=["engine"]), "engine.open")
    assert opened[-1]["data"] == {"engine": "demo-0", "state": "open", "version": 0, "reason": ""}
    await gateway.admin.add_engine("extra", gateway.slot.url, wait_s=LONG_S)
    came = await read(gateway.admin.events(after=opened[-1]["id"], kinds=["engine"]), "engine.open")
    assert came[-1]["data"]["engine"] == "extra"
    await gateway.admin.remove_engine("extra", wait_s=LONG_S)
    seen = await read(gateway.admin.events(after=came[-1]["id"], kinds=["engine"]), "engine.removed")
    assert seen[-1]["data"] == {"engine": "extra"}


async def test_a_browser_goes_on_after_the_last_id_over_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(tiny_model, tmp_path, staleness=STALENESS)
    async with run_gateway(values) as gateway:
        await train_once(gateway, "before")
        before = await stored(gateway.admin)
        middle = before[len(before) // 2]["id"]
    async with run_gateway(values) as gateway:
        await train_once(gateway, "after")
        everything = await stored(gateway.admin)
        assert everything[: len(before)] == before
        assert of(everything[len(before) :], "trainer") == ["trainer.step"]
        # Its last id has precedence over its address
        response = await gateway.http.get(
            "/admin/v1/events?last=3&wait=0", headers={"Last-Event-ID": str(middle)}
        )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    later = [json.loads(line) for line in lines]
    assert later[: len(everything) - len(before) // 2 - 1] == [e for e in everything if e["id"] > middle]


async def test_projects_receive_only_their_own_events(tiny_model: Path, tmp_path: Path) -> None:
    keys = {name: f"the key of the project {name}" for name in ("ann", "bob")}
    projects = {name: {"key": key, "models": [f"{name}s"]} for name, key in keys.items()}
    models: dict[str, dict[str, Any]] = {"anns": {}, "bobs": {}}
    admin = {"key": "the key of the root, which reaches everything"}
    async with gateway_of(tiny_model, tmp_path, models, projects=projects, admin=admin) as (gateway, _):
        async with (
            GatewayClient(gateway.url, keys["ann"]) as ann,
            GatewayClient(gateway.url, keys["bob"]) as bob,
        ):
            for client, model in ((ann, "anns"), (bob, "bobs")):
                opened = await client.open_episode("t", group_id="shared", model=model)
                await client.abandon(opened.episode_id, "over")
                await client.post_step(1, {}, model=model)
            for client, model in ((ann, "anns"), (bob, "bobs")):
                for chosen in ({}, {"model": model}, {"group": "shared"}, {"kinds": ["trainer"]}):
                    seen = await stored(client, **chosen)
                    assert {event["model"] for event in seen} == {model}, chosen
            assert {event["model"] for event in await stored(gateway.admin)} == {"anns", "bobs"}
            hidden = [await refused(stored(bob, model=name)) for name in ("anns", "never")]
            assert [(e.status, e.code) for e in hidden] == [(404, "no_model")] * 2
            assert (await refused(bob.post_step(2, {}, model="anns"))).status == 404
        async with GatewayClient(gateway.url, "another key") as stranger:
            assert (await refused(stored(stranger))).status == 401


async def test_the_command_shows_the_events_of_the_stream(gateway: RunningGateway) -> None:
    await train_once(gateway)
    command = ["tail", "--gateway", gateway.url, "--no-follow"]

    async def shown(*more: str) -> list[str]:
        result = await asyncio.to_thread(CliRunner().invoke, app, [*command, *more])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    everything = await stored(gateway.admin, kinds=["episode", "trainer"])
    kinds = "--kind", "episode", "--kind", "trainer"
    assert [json.loads(line) for line in await shown("--after", "0", "--json", *kinds)] == everything
    (last,) = await shown("--last", "1", "--kind", "trainer")
    assert "trainer.step" in last and "step=1" in last and "\x1b" not in last
    assert len(await shown("--last", "100", "--kind", "batch", "--kind", "episode.closed")) == 3
    refused = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--kind", "No"])
    assert refused.exit_code == 2 and "--kind" in refused.stderr


async def refused(work: Any) -> GatewayRefused:
    with pytest.raises(GatewayRefused) as error:
        await work
    return error.value


async def test_wrong_queries_of_the_stream_are_refused_by_name(gateway: RunningGateway) -> None:
    for query, param in (
        ("after=-1", "after"),
        ("after=x", "after"),
        ("after=1&last=1", "last"),
        ("last=100000", "last"),
        ("kind=Episode", "kind"),
        ("kind=episodes", "kind"),
        ("kind=a.b.c", "kind"),
        ("wait=-1", "wait"),
        ("wait=nan", "wait"),
        ("model=", "model"),
    ):
        response = await gateway.http.get(f"/admin/v1/events?{query}")
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), query
        assert param in (error["param"] or ""), query
    for last in ("x", "-1", "1.5", "9" * 30, "²"):
        response = await gateway.http.get("/admin/v1/events", headers={"Last-Event-ID": last.encode()})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID"), last


async def test_a_wrong_step_is_refused_and_makes_no_event(gateway: RunningGateway) -> None:
    for body in (
        {},
        {"step": "1"},
        {"step": 1, "figures": {"loss": "low"}},
        {"step": 1, "figures": {"loss": True}},
        {"step": 1, "figures": {"": 1}},
        {"step": 1, "figures": {str(n): 0 for n in range(1_001)}},
        {"step": -1},
        {"step": 1, "more": 1},
    ):
        response = await gateway.http.post("/admin/v1/steps", json=body)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), (
            body
        )
    response = await gateway.http.post("/admin/v1/steps", content='{"step": 1, "figures": {"loss": NaN}}')
    assert response.status_code == 400
    assert await stored(gateway.admin, kinds=["trainer"]) == []


async def test_a_killed_gateway_has_an_event_for_all_that_it_has_done_and_nothing_else(
    tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    engine = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
    values = settings_for(tiny_model, tmp_path, engine=engine, staleness={**STALENESS, "batch": 64})
    done: Counter[str] = Counter()

    async def work(client: GatewayClient, number: int) -> None:
        while True:
            opened = await client.open_episode("t", f"g{number}", mode="eval")
            done[f"episode.opened {opened.episode_id}"] += 1
            await client.reward(opened.episode_id, 1.0)
            done[f"episode.closed {opened.episode_id}"] += 1

    async def until_killed(client: GatewayClient, number: int) -> None:
        with suppress(httpx.HTTPError):
            await work(client, number)

    async with serve(create_fake_app(FakeEngine("none")), port):
        process = programs.gateway(values, tmp_path / "gateway.log")
        await process.start()
        async with GatewayClient(process.url) as client:
            working = [asyncio.create_task(until_killed(client, n)) for n in range(6)]
            await until(lambda: len(done) > 60, "much is done")
            await asyncio.to_thread(process.kill)
            await asyncio.gather(*working)
        await process.start()
        async with GatewayClient(process.url) as client:
            seen = await stored(client, kinds=["episode.opened", "episode.closed"])
        process.kill()
    counted = Counter(f"{event['kind']} {event['episode']}" for event in seen)
    assert set(counted.values()) == {1}
    assert done.keys() <= counted.keys()
    with sqlite3.connect(tmp_path / "gateway.db") as store:
        rows = store.execute("SELECT id, state FROM episodes").fetchall()
    expected = {f"episode.opened {e}" for e, _ in rows} | {
        f"episode.closed {e}" for e, s in rows if s == "closed"
    }
    assert counted.keys() == expected
    assert [event["id"] for event in seen] == sorted(event["id"] for event in seen)
