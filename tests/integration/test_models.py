"""Several models behind one gateway: each trained one has versions, a ledger and leases of its own; frozen ones are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.fake import FakeEngine, Faults, create_fake_app
from headgate.client import EpisodeRunner, Task
from headgate.client.admin import GatewayRefused
from headgate.client.agents import FunctionAgent
from headgate.processes.ports import free_port
from headgate.types import EpisodeMode
from tests.harness.gateways import Engines, RunningGateway, gateway_of, serve
from tests.harness.records import check_sampled_by_the_fake, versions_of
from tests.harness.waiting import until
from tests.harness.weights import fake_weights, publish

HOUR_S = 3600.0


@pytest.fixture
async def pair(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[RunningGateway, Engines]]:
    """Two trained models."""
    async with gateway_of(tiny_model, tmp_path, {"actor": {}, "planner": {}}) as found:
        yield found


@pytest.fixture
async def judged(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[RunningGateway, Engines]]:
    """A trained model, and a frozen one."""
    sampling = {"temperature": {"override": 1.0}, "top_p": {"override": 1.0}, "seed": "ignore"}
    models: dict[str, Any] = {"actor": {}, "judge": {"train": False, "aliases": ["judge-7b"]}}
    async with gateway_of(tiny_model, tmp_path, models, sampling=sampling) as found:
        yield found


async def refused(work: Any, status: int, code: str) -> None:
    with pytest.raises(GatewayRefused) as error:
        await work
    assert (error.value.status, error.value.code) == (status, code)


async def finished(gateway: RunningGateway, model: str, *names: str) -> str:
    """Return a rewarded episode of `model` with one call to each of `names`."""
    episode, headers = await gateway.open("task", model=model)
    for name in names:
        assert (await gateway.chat(headers, model=name, max_tokens=6)).status_code == 200
    await gateway.admin.reward(episode, 1.0)
    return episode


async def sampled(gateway: RunningGateway, episode: str, model: str) -> list[dict[str, Any]]:
    """The turns that a model sampled in an episode."""
    found = await gateway.admin.trajectory(episode, model)
    assert found["model"] == model
    return [node for node in found["nodes"] if node["sampled"]]


@pytest.mark.parametrize(("model", "mode"), [("planner", "train"), ("actor", "eval")])
async def test_a_lonely_group_is_closed_whatever_runs_elsewhere_under_its_name(
    tiny_model: Path, tmp_path: Path, model: str, mode: EpisodeMode
) -> None:
    """Neither another model's group nor an evaluation episode is a member that the group waits for."""
    limits = {"episodes": {"idle_s": HOUR_S}, "staleness": {"batch": 1, "eta": 0, "min_members": 1}}
    async with gateway_of(tiny_model, tmp_path, {"actor": {}, "planner": {}}, **limits) as (gateway, engines):
        first, headers = await gateway.open("task", model="actor", group_id="g", group_size=2)
        await gateway.chat(headers, model="actor", max_tokens=2)
        await gateway.admin.reward(first, 1.0)
        engines[model].faults = Faults(stall=True)
        other, headers = await gateway.open("task", model=model, mode=mode, group_id="g", group_size=2)
        call = asyncio.create_task(gateway.chat(headers, model=model))
        deadlines = gateway.services.episodes._group_deadlines
        await until(lambda: ("actor", "g") in deadlines._without_member, "the group is lonely")
        deadlines._without_member["actor", "g"] -= 2 * HOUR_S
        lease = await gateway.admin.lease("trainer", model="actor")
        got = await gateway.admin.leased_groups(lease, wait_s=60, model="actor")
        assert [group.group_id for group in got.groups] == ["g"] and got.complete
        assert (await gateway.admin.episode(other))["state"] == "open"
        call.cancel()
        await asyncio.wait({call})


async def test_publishing_to_one_model_does_not_touch_the_other(
    pair: tuple[RunningGateway, Engines], tiny_model: Path, tmp_path: Path
) -> None:
    gateway, engines = pair
    weights = publish(fake_weights(tmp_path / "source", "weights 1"), tmp_path / "v1", 1, 0)
    record = await gateway.admin.publish(1, str(weights), wait_s=60, model="planner")
    assert (record["state"], record["model"]) == ("live", "planner")
    actor, planner = [await gateway.admin.status(name) for name in ("actor", "planner")]
    assert (actor["version"], actor["updates"], actor["consumed"]) == (0, 0, 0)
    assert (planner["version"], planner["updates"], planner["consumed"]) == (1, 1, 1)
    assert (engines["actor"].label, engines["planner"].label) == ("0", "1")
    await refused(gateway.admin.weights(1, "actor"), 404, "no_version")
    states = {engine["model"]: engine["version"] for engine in await gateway.admin.engines()}
    assert states == {"actor": 0, "planner": 1}
    for model, version in (("actor", 0), ("planner", 1)):
        episode, headers = await gateway.open("task", model=model)
        assert (await gateway.chat(headers, model=model, max_tokens=8)).status_code == 200
        tree = await gateway.admin.trajectory(episode)
        turn = tree["nodes"][-1]
        assert (tree["model"], set(versions_of(turn)), turn["mask_reason"]) == (model, {version}, "")
        check_sampled_by_the_fake(tree["nodes"], turn, {0: tiny_model, 1: weights})


async def test_each_model_has_slots_of_its_own(pair: tuple[RunningGateway, Engines]) -> None:
    gateway, _ = pair
    opened = await gateway.admin.open_episode("task", model="actor")
    await refused(gateway.admin.open_episode("task", model="actor"), 429, "no_slot")
    assert (await gateway.admin.status("planner"))["free_slots"] == 1
    await gateway.admin.open_episode("task", model="planner")
    await refused(gateway.admin.open_episode("task", model="planner"), 429, "no_slot")
    await gateway.admin.abandon(opened.episode_id, "not needed")
    assert (await gateway.admin.status("actor"))["free_slots"] == 1
    assert (await gateway.admin.status("planner"))["free_slots"] == 0


async def test_staleness_may_differ(tiny_model: Path, tmp_path: Path) -> None:
    models: dict[str, Any] = {"actor": {}, "planner": {"staleness": {"batch": 3, "eta": 1}}}
    async with gateway_of(tiny_model, tmp_path, models) as (gateway, _):
        slots = [(await gateway.admin.status(name))["free_slots"] for name in ("actor", "planner")]
        assert slots == [1, 6]
        assert (await gateway.admin.lease("trainer", "planner")).size == 3


async def test_leases_of_two_models_have_nothing_to_do_with_each_other(
    pair: tuple[RunningGateway, Engines],
) -> None:
    gateway, _ = pair
    admin = gateway.admin
    episodes = {model: await finished(gateway, model, model) for model in ("actor", "planner")}
    first, again = [await admin.lease("trainer of the actor", "actor") for _ in range(2)]
    other = await admin.lease("trainer of the planner", "planner")
    assert [first.fence, again.fence, other.fence] == [1, 2, 1]
    for model, lease in (("actor", again), ("planner", other)):
        (group,) = (await admin.leased_groups(lease, model=model)).groups
        assert [episode.episode_id for episode in group.episodes] == [episodes[model]]
    await refused(admin.ack(other, "x", "actor"), 404, "no_lease")
    await refused(admin.renew(again, "planner"), 404, "no_lease")
    await refused(admin.leased_groups(other), 404, "no_lease")  # without a name: the first
    await admin.ack(other, "checkpoint-1", "planner")
    await admin.nack(again, "out of memory", "actor")
    consumed = {name: (await admin.status(name))["consumed"] for name in ("actor", "planner")}
    assert consumed == {"actor": 0, "planner": 1}


async def test_a_call_to_another_model_is_recorded_and_reaches_no_feed(
    pair: tuple[RunningGateway, Engines],
) -> None:
    gateway, engines = pair
    before = engines["planner"].sampled
    episode = await finished(gateway, "actor", "actor", "planner", "any")
    assert engines["planner"].sampled > before
    own, other = [await sampled(gateway, episode, name) for name in ("actor", "planner")]
    assert [turn["mask_reason"] for turn in own] == ["", ""]
    assert [turn["mask_reason"] for turn in other] == ["other_model"]
    calls = (await gateway.admin.episode(episode))["calls"]
    assert [call["model"] for call in calls] == ["actor", "planner", "actor"]
    leased = await gateway.admin.leased_groups(await gateway.admin.lease("trainer", "actor"))
    (found,) = leased.groups[0].episodes
    ids = {node.call_id for node in found.nodes if node.sampled}
    assert ids == {turn["call_id"] for turn in own}
    lease = await gateway.admin.lease("trainer", "planner")
    assert (await gateway.admin.leased_groups(lease, model="planner")).groups == ()


async def test_two_models_survive_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    weights = publish(fake_weights(tmp_path / "source", "weights 1"), tmp_path / "v1", 1, 0)
    async with gateway_of(tiny_model, tmp_path, {"actor": {}, "planner": {}}) as (gateway, _):
        await gateway.admin.publish(1, str(weights), wait_s=60, model="planner")
        episode = await finished(gateway, "planner", "planner", "actor")
        fence = (await gateway.admin.lease("trainer", "planner")).fence
    async with gateway_of(tiny_model, tmp_path, {"actor": {}, "planner": {}}) as (gateway, engines):
        versions = {name: (await gateway.admin.status(name))["version"] for name in ("actor", "planner")}
        assert versions == {"actor": 0, "planner": 1}
        assert (engines["actor"].label, engines["planner"].label) == ("0", "1")
        assert len(await sampled(gateway, episode, "actor")) == 1
        lease = await gateway.admin.lease("trainer", "planner")
        assert (lease.fence, lease.batch) == (fence + 1, 1)
        (group,) = (await gateway.admin.leased_groups(lease, model="planner")).groups
        assert group.episodes[0].episode_id == episode
        assert (await gateway.admin.lease("trainer", "actor")).fence == 1


async def test_a_driver_runs_episodes_of_the_model_it_names(pair: tuple[RunningGateway, Engines]) -> None:
    gateway, _ = pair

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}"}
        return float((await gateway.chat(headers, model="planner", max_tokens=4)).is_success)

    runner = EpisodeRunner(gateway.admin, FunctionAgent(solve), model="planner", concurrency=1)
    (outcome,) = await runner.run([Task("t", {"task_id": "t"})])
    assert outcome.reward == 1.0
    assert (await gateway.admin.episode(outcome.episode_id or ""))["model"] == "planner"


async def test_a_frozen_model_is_recorded_and_never_trained(judged: tuple[RunningGateway, Engines]) -> None:
    gateway, engines = judged
    episode = await finished(gateway, "actor", "actor", "judge", "judge-7b")
    assert engines["judge"].sampled > 0
    turns = await sampled(gateway, episode, "judge")
    assert [turn["mask_reason"] for turn in turns] == ["frozen_model"] * 2
    assert {version for turn in turns for version in versions_of(turn)} == {0}
    leased = await gateway.admin.leased_groups(await gateway.admin.lease("trainer"))
    (found,) = leased.groups[0].episodes
    assert {node.mask_reason for node in found.nodes} == {""}
    assert len([node for node in found.nodes if node.sampled]) == 1


async def test_overrides_of_training_are_not_for_a_frozen_model(
    judged: tuple[RunningGateway, Engines],
) -> None:
    gateway, _ = judged
    episode, headers = await gateway.open("task")
    for model in ("actor", "judge"):
        body = {"model": model, "temperature": 0.25, "top_p": 0.5, "seed": 7, "max_tokens": 4}
        assert (await gateway.chat(headers, **body)).status_code == 200
    calls = (await gateway.admin.episode(episode))["calls"]
    used = {c["model"]: [c["used"][name] for name in ("temperature", "top_p", "seed")] for c in calls}
    assert used == {"actor": [1.0, 1.0, None], "judge": [0.25, 0.5, 7]}


async def test_a_frozen_model_has_no_versions_leases_or_episodes(
    judged: tuple[RunningGateway, Engines], tmp_path: Path
) -> None:
    gateway, engines = judged
    admin = gateway.admin
    weights = publish(fake_weights(tmp_path / "source", "weights 1"), tmp_path / "v1", 1, 0)
    await refused(admin.publish(1, str(weights), model="judge"), 409, "model_frozen")
    await refused(admin.lease("trainer", "judge"), 400, "model_frozen")
    await refused(admin.status("judge"), 400, "model_frozen")
    await refused(admin.open_episode("task", model="judge"), 400, "model_frozen")
    await refused(admin.open_episode("task", model="unknown"), 404, "model_not_found")
    assert engines["judge"].label == "0"
    assert (await admin.weights(0, "judge"))["state"] == "live"


async def test_engines_and_calls_are_listed_moved_added_and_removed_by_the_client(
    judged: tuple[RunningGateway, Engines],
) -> None:
    gateway, engines = judged
    admin = gateway.admin
    helper, port = FakeEngine("none"), free_port()
    async with serve(create_fake_app(helper), port):
        added = await admin.add_engine("helper", f"http://127.0.0.1:{port}", "judge", wait_s=60)
        assert (added["name"], added["model"], added["state"]) == ("helper", "judge", "open")
        for engine in (engines["judge"], helper):
            engine.hold_after(1)  # it is not over before it has moved, however slow the machine is
        _, headers = await gateway.open("task")
        async with gateway.http.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": "judge", "messages": [{"role": "user", "content": "hi"}], "stream": True},
            headers=headers,
        ) as response:
            lines = response.aiter_lines()
            await anext(lines)
            (call,) = await admin.calls()
            other = "judge-0" if call["engine"] == "helper" else "helper"
            await admin.move_call(call["call_id"], other)

            async def moved() -> bool:
                running = await admin.calls()
                return not running or running[0]["engine"] == other

            await until(moved, "the call goes on elsewhere")
            for engine in (engines["judge"], helper):
                engine.release()
            assert "data: [DONE]" in [line async for line in lines]
        assert (await admin.remove_engine("helper", wait_s=60))["removed"]
    assert {engine["name"] for engine in await admin.engines()} == {"actor-0", "judge-0"}


async def test_names(tiny_model: Path, tmp_path: Path) -> None:
    models: dict[str, Any] = {"actor": {"aliases": ["gpt-4o", "gpt-4o-mini"]}, "judge": {"train": False}}
    async with gateway_of(tiny_model, tmp_path, models) as (gateway, _):
        listed = (await gateway.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [m["id"] for m in listed["data"]] == ["actor", "gpt-4o", "gpt-4o-mini", "judge"]
        episode, headers = await gateway.open("task")
        assert (await gateway.chat(headers, model="gpt-4o-mini", max_tokens=2)).status_code == 200
        for stream in (False, True):
            response = await gateway.chat(headers, model="gpt-5", stream=stream)
            assert response.status_code == 404
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "gpt-5" in error["message"]
        assert len(await sampled(gateway, episode, "actor")) == 1


async def test_every_other_name_may_mean_a_helper(tiny_model: Path, tmp_path: Path) -> None:
    models: dict[str, Any] = {"actor": {"aliases": ["me"]}, "judge": {"train": False, "aliases": ["*"]}}
    async with gateway_of(tiny_model, tmp_path, models) as (gateway, _):
        episode = await finished(gateway, "actor", "me", "another")
        assert [len(await sampled(gateway, episode, name)) for name in ("actor", "judge")] == [1, 1]
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [m["id"] for m in listed] == ["actor", "me", "judge"]


async def test_an_unknown_name_means_the_model_of_the_episode(pair: tuple[RunningGateway, Engines]) -> None:
    gateway, _ = pair
    for model in ("actor", "planner"):
        opened = await gateway.admin.open_episode("task", model=model)
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        assert (await gateway.chat(headers, model="gpt-4o", max_tokens=3)).status_code == 200
        (call,) = (await gateway.admin.episode(opened.episode_id))["calls"]
        assert call["model"] == model
        nodes = (await gateway.admin.trajectory(opened.episode_id))["nodes"]
        assert [node["mask_reason"] for node in nodes] == ["", ""]
