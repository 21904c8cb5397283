"""Rewards of calls: they are part of the episode's, and a trainer sees them on their turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gateway.config.settings import Settings
from gateway.training_feed.export import Selection, export
from headgate.arrow import groups_from_arrow, groups_to_arrow
from headgate.client.admin import GatewayRefused
from headgate.types import Group
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.records import nodes_of
from tests.harness.retries import lasting


async def called(gateway: RunningGateway, headers: dict[str, str], count: int) -> list[str]:
    """Return the ids of `count` calls, as the agent sees them."""
    ids = []
    for i in range(count):
        messages = [{"role": "user", "content": f"call {i}"}]
        ids.append((await gateway.chat(headers, messages=messages, max_tokens=3)).json()["id"])
    return ids


async def refused(work: Any, status: int, code: str) -> None:
    with pytest.raises(GatewayRefused) as error:
        await work
    assert (error.value.status, error.value.code) == (status, code)


async def test_they_reach_the_trainer_on_their_turns_and_in_the_sum(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task", group_id="g")
    first, second, third = await called(gateway, headers, 3)
    await gateway.admin.call_reward(episode, first, 0.5)
    await gateway.admin.call_reward(episode, third, 8.0)
    await gateway.admin.call_reward(episode, third, -0.25)
    await gateway.admin.reward(episode, 1.0, {"form": 1.0})
    row = await gateway.admin.episode(episode)
    assert row["reward"] == 1.0 + 0.5 - 0.25
    assert row["components"] == {"form": 1.0, "calls": 0.25}
    assert {call["id"]: call["reward"] for call in row["calls"]} == {first: 0.5, second: None, third: -0.25}
    lease = await gateway.admin.lease("trainer")
    groups = (await gateway.admin.leased_groups(lease, wait_s=60)).groups
    assert groups_from_arrow(groups_to_arrow(groups))[0].episodes[0].reward == 1.25
    (fed,) = groups[0].episodes
    assert fed.components == {"form": 1.0, "calls": 0.25}
    rewards = {node.call_id: node.reward for node in fed.nodes if node.sampled}
    assert rewards == {first: 0.5, second: None, third: -0.25}
    assert all(node.reward is None for node in fed.nodes if not node.sampled)
    shown = {node["call_id"]: node["reward"] for node in await nodes_of(gateway, episode) if node["sampled"]}
    assert shown == rewards


async def test_they_and_the_ends_of_calls_are_fed_again_after_a_restart(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The lease outlasts the gateway; the record of the trained batch and an export have them too."""
    staleness = {"batch": 1, "eta": 0, "min_members": 1}
    values = settings_for(tiny_model, tmp_path, staleness=staleness, feed={"lease_s": 3600})
    posted: dict[str, tuple[float | None, str]] = {}
    async with run_gateway(values) as gateway:
        episode, headers = await gateway.open("task")
        question = lasting(gateway)
        for limit, reward in [(2, 0.5), (2000, None), (1, -2.0)]:
            reply = (await gateway.chat(headers, **question | {"max_tokens": limit})).json()
            if reward is not None:
                await gateway.admin.call_reward(episode, reply["id"], reward)
            posted[reply["id"]] = reward, reply["choices"][0]["finish_reason"]
        await gateway.admin.reward(episode, 1.0)
        lease = await gateway.admin.lease("trainer")
        before = (await gateway.admin.leased_groups(lease, wait_s=60)).groups
        shown = await nodes_of(gateway, episode)
    assert [finish for _, finish in posted.values()] == ["length", "stop", "length"]
    assert [(n["reward"], n["finish_reason"]) for n in shown if n["sampled"]] == [*posted.values()]
    check_fed(before, posted)
    async with run_gateway(values) as gateway:
        leased = (await gateway.admin.leased_groups(lease)).groups
        await gateway.admin.ack(lease, "checkpoint")
        recorded = await gateway.admin.batch_groups(lease.batch)
    export(Settings.parse(values), Selection("demo"), tmp_path / "out.parquet")
    for groups in (leased, recorded, groups_from_arrow(pq.read_table(tmp_path / "out.parquet"))):
        check_fed(groups, posted)


def check_fed(groups: tuple[Group, ...], posted: dict[str, tuple[float | None, str]]) -> None:
    """One episode, whose calls have the rewards and ends that the client knows; nothing of it stands on prompts."""
    ((episode,),) = [group.episodes for group in groups]
    assert episode.reward == 1.0 + 0.5 - 2.0
    assert {n.call_id: (n.reward, n.finish_reason) for n in episode.nodes if n.sampled} == posted
    assert {(n.reward, n.finish_reason) for n in episode.nodes if not n.sampled} == {(None, "")}


async def test_the_ledger_receives_the_whole_reward(tiny_model: Path, tmp_path: Path) -> None:
    """Two members whose rewards are equal only without those of their calls: the group is not dropped as a group of equals."""
    staleness = {"batch": 1, "eta": 0, "drop_equal": True}
    async with run_gateway(settings_for(tiny_model, tmp_path, staleness=staleness)) as gateway:
        for group, extra in (("equal", 0.0), ("different", 1.0)):
            for bonus in (0.0, extra):
                episode, headers = await gateway.open("task", group_id=group, group_size=2)
                (call,) = await called(gateway, headers, 1)
                await gateway.admin.call_reward(episode, call, bonus)
                await gateway.admin.reward(episode, 1.0)
        lease = await gateway.admin.lease("trainer")
        groups = (await gateway.admin.leased_groups(lease, wait_s=60)).groups
        assert [g.group_id for g in groups] == ["different"]
        assert sorted(e.reward for e in groups[0].episodes) == [1.0, 2.0]


async def test_they_alone_can_be_the_reward(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task")
    first, second = await called(gateway, headers, 2)
    await gateway.admin.call_reward(episode, first, 1.0)
    await gateway.admin.call_reward(episode, second, 2.0)
    fate = await gateway.admin.close_episode(episode)
    assert (fate["state"], fate["reason"]) == ("closed", "rewarded")
    assert (fate["reward"], fate["components"]) == (3.0, {"calls": 3.0})


async def test_the_same_final_reward_again_is_the_same_request(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task")
    (call,) = await called(gateway, headers, 1)
    await gateway.admin.call_reward(episode, call, 0.1)
    await gateway.admin.reward(episode, 0.2)
    await gateway.admin.reward(episode, 0.2)
    await refused(gateway.admin.reward(episode, 0.3), 409, "episode_closed")
    assert (await gateway.admin.episode(episode))["reward"] == 0.2 + 0.1


async def test_they_are_of_recorded_calls_of_open_episodes(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task")
    other, other_headers = await gateway.open("other")
    (call,), (others,) = (await called(gateway, headers, 1), await called(gateway, other_headers, 1))
    await refused(gateway.admin.call_reward(episode, "chatcmpl-none", 1.0), 404, "no_call")
    await refused(gateway.admin.call_reward(episode, others, 1.0), 404, "no_call")
    await refused(gateway.admin.call_reward("ep-none", call, 1.0), 404, "no_episode")
    await gateway.admin.reward(episode, 1.0)
    await refused(gateway.admin.call_reward(episode, call, 1.0), 409, "episode_closed")
    row = await gateway.admin.episode(episode)
    assert (row["reward"], row["components"]) == (1.0, None)
    await refused(gateway.admin.reward(other, 1.0, {"calls": 1.0}), 400, "invalid_value")
    for wrong in ("NaN", "Infinity", '"1"x'):
        path = f"/admin/v1/episodes/{other}/calls/{others}/reward"
        body = f'{{"reward": {wrong}}}'
        response = await gateway.http.post(
            path, content=body.encode(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
