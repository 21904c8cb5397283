"""The feed: one batch at a time, group by group, to one trainer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.arrow import groups_to_arrow
from headgate.client.admin import GatewayRefused
from tests.faults.virtual.clock import Clock
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.records import nodes_of, versions_of
from tests.harness.waiting import result_of


async def finished(gateway: RunningGateway, task: str, members: int = 1, calls: int = 1) -> list[str]:
    """A rewarded group; its episodes."""
    episodes = [await gateway.open(task, group_id=task, group_size=members) for _ in range(members)]
    for number, (episode, headers) in enumerate(episodes):
        for call in range(calls):
            messages = [{"role": "user", "content": f"{task} {call}"}]
            assert (await gateway.chat(headers, messages=messages, max_tokens=6)).status_code == 200
        await gateway.admin.reward(episode, float(number))
    return [episode for episode, _ in episodes]


async def refused(work: Any, status: int, code: str) -> None:
    with pytest.raises(GatewayRefused) as error:
        await work
    assert (error.value.status, error.value.code) == (status, code)


async def test_groups_come_by_cursor_while_the_batch_fills(gateway: RunningGateway) -> None:
    lease = await gateway.admin.lease("trainer")
    assert (lease.batch, lease.size) == (0, 2)
    nothing = await gateway.admin.leased_groups(lease)
    assert (nothing.groups, nothing.cursor, nothing.complete) == ((), 0, False)
    await finished(gateway, "a")
    first = await gateway.admin.leased_groups(lease, nothing.cursor, wait_s=60)
    assert ([g.group_id for g in first.groups], first.cursor, first.complete) == (["a"], 1, False)
    await finished(gateway, "b")
    second = await gateway.admin.leased_groups(lease, first.cursor, wait_s=60)
    assert ([g.group_id for g in second.groups], second.cursor, second.complete) == (["b"], 2, True)
    again = await gateway.admin.leased_groups(lease)
    assert [g.group_id for g in again.groups] == ["a", "b"]


async def test_waiting_for_groups_ends_as_soon_as_there_is_one(gateway: RunningGateway) -> None:
    lease = await gateway.admin.lease("trainer")
    waiting = asyncio.create_task(gateway.admin.leased_groups(lease, wait_s=60), name="waiting")
    await finished(gateway, "a")
    got = await result_of(waiting, "the groups that are waited for are there", 30)
    assert [group.group_id for group in got.groups] == ["a"]


async def test_what_the_trainer_gets_is_what_was_recorded(gateway: RunningGateway) -> None:
    episodes = await finished(gateway, "a", members=2, calls=3)
    lease = await gateway.admin.lease("trainer")
    (group,) = (await gateway.admin.leased_groups(lease)).groups
    assert (group.group_id, group.task_id, group.version) == ("a", "a", 0)
    assert [episode.episode_id for episode in group.episodes] == episodes
    assert [episode.reward for episode in group.episodes] == [0.0, 1.0]
    for episode in group.episodes:
        shown = await nodes_of(gateway, episode.episode_id)
        assert len(episode.nodes) == len(shown) == 6
        for node, row in zip(episode.nodes, shown, strict=True):
            for name in ("index", "parent", "at", "sampled", "temperature", "mask_reason", "call_id"):
                assert getattr(node, name) == row[name]
            assert node.ids.tolist() == row["ids"]
            assert node.logprobs.tolist() == row["logprobs"]
            assert node.versions.tolist() == versions_of(row)
            assert len(node.flags) == len(row["flags"])


async def test_eval_and_abandoned_episodes_are_in_no_lease(gateway: RunningGateway) -> None:
    evaluated, headers = await gateway.open("a", group_id="a", mode="eval")
    await gateway.chat(headers, max_tokens=2)
    await gateway.admin.reward(evaluated, 1.0)
    kept, headers = await gateway.open("a", group_id="a", group_size=2)
    gone, gone_headers = await gateway.open("a", group_id="a", group_size=2)
    await gateway.chat(headers, max_tokens=2)
    await gateway.chat(gone_headers, max_tokens=2)
    await gateway.admin.abandon(gone, "crashed")
    await gateway.admin.reward(kept, 1.0)
    lease = await gateway.admin.lease("trainer")
    (group,) = (await gateway.admin.leased_groups(lease)).groups
    assert [episode.episode_id for episode in group.episodes] == [kept]


async def test_ack_consumes_the_batch(gateway: RunningGateway) -> None:
    for task in "abc":
        await finished(gateway, task)
    lease = await gateway.admin.lease("trainer")
    await gateway.admin.ack(lease, "checkpoint-1")
    assert (await gateway.admin.status())["consumed"] == 1
    await refused(gateway.admin.leased_groups(lease), 404, "no_lease")
    await gateway.admin.ack(lease, "checkpoint-1")  # the response was lost
    await refused(gateway.admin.ack(lease, "checkpoint-2"), 404, "no_lease")
    assert (await gateway.admin.status())["consumed"] == 1
    following = await gateway.admin.lease("trainer")
    assert following.batch == 1
    assert following.fence > lease.fence
    got = await gateway.admin.leased_groups(following)
    assert ([g.group_id for g in got.groups], got.complete) == (["c"], False)


async def test_a_batch_that_is_not_whole_cannot_be_acked(gateway: RunningGateway) -> None:
    await finished(gateway, "a")
    lease = await gateway.admin.lease("trainer")
    await refused(gateway.admin.ack(lease, "checkpoint-1"), 409, "batch_not_ready")
    assert (await gateway.admin.status())["consumed"] == 0
    await finished(gateway, "b")
    await gateway.admin.ack(lease, "checkpoint-1")


async def test_nack_gives_the_same_batch_out_again(gateway: RunningGateway) -> None:
    for task in "ab":
        await finished(gateway, task)
    lease = await gateway.admin.lease("trainer")
    await gateway.admin.nack(lease, "out of memory")
    await refused(gateway.admin.ack(lease, "x"), 404, "no_lease")
    again = await gateway.admin.lease("another")
    assert again.batch == lease.batch
    assert [g.group_id for g in (await gateway.admin.leased_groups(again)).groups] == ["a", "b"]


async def test_only_one_consumer_holds_a_lease_and_it_may_take_its_own_over(gateway: RunningGateway) -> None:
    lease = await gateway.admin.lease("trainer")
    await refused(gateway.admin.lease("another"), 409, "lease_held")
    restarted = await gateway.admin.lease("trainer")
    assert restarted.fence > lease.fence
    await refused(gateway.admin.leased_groups(lease), 404, "no_lease")


async def test_an_older_fence_is_refused(gateway: RunningGateway) -> None:
    lease = await gateway.admin.lease("trainer")
    older, admin = replace(lease, fence=lease.fence - 1), gateway.admin
    for work in (
        admin.ack(older, "x"),
        admin.nack(older, "x"),
        admin.renew(older),
        admin.leased_groups(older),
    ):
        await refused(work, 409, "fenced")
    await admin.renew(lease)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The leases' own."""
    clock = Clock()
    monkeypatch.setattr("gateway.training_feed.leases.time", clock)
    return clock


async def test_a_lease_that_is_not_renewed_ends_and_another_consumer_gets_it(
    tiny_model: Path, tmp_path: Path, clock: Clock
) -> None:
    values = settings_for(
        tiny_model, tmp_path, staleness={"batch": 1, "min_members": 1}, feed={"lease_s": 10.0}
    )
    async with run_gateway(values) as gateway:
        await finished(gateway, "a")
        lease = await gateway.admin.lease("slow")

        async def taken_over() -> bool:
            try:
                return (await gateway.admin.lease("fast")).fence > lease.fence
            except GatewayRefused:
                return False

        clock.now += 9
        assert not await taken_over()
        await gateway.admin.renew(lease)
        clock.now += 9
        assert not await taken_over()
        clock.now += 2
        await refused(gateway.admin.leased_groups(lease), 409, "lease_expired")
        await refused(gateway.admin.ack(lease, "x"), 409, "lease_expired")
        assert await taken_over()
        await refused(gateway.admin.ack(lease, "x"), 404, "no_lease")
        assert (await gateway.admin.status())["consumed"] == 0


async def test_a_trained_batch_can_be_read_again_as_the_lease_gave_it(gateway: RunningGateway) -> None:
    for task in "abcd":
        await finished(gateway, task, members=2)
    leased = []
    for _ in range(2):
        lease = await gateway.admin.lease("trainer")
        leased.append((await gateway.admin.leased_groups(lease)).groups)
        await refused(gateway.admin.batch_groups(lease.batch), 404, "no_batch")
        await gateway.admin.ack(lease, "checkpoint")
    shown = await gateway.admin.batches()
    assert [(row["batch"], row["groups"]) for row in shown] == [(0, 2), (1, 2)]
    assert shown[0]["trained_at"] <= shown[1]["trained_at"]
    for batch, groups in enumerate(leased):
        again = await gateway.admin.batch_groups(batch)
        assert groups_to_arrow(again).equals(groups_to_arrow(groups))
        assert {group.batch for group in again} == {batch}


async def test_the_trainer_hears_of_conversations_that_ended_because_the_context_was_full(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Over a restart; one that was shortened and went on did not end so."""
    models = {"demo": {"path": str(tiny_model), "max_model_len": 120}}
    values = settings_for(tiny_model, tmp_path, models=models, staleness={"batch": 1, "eta": 0})
    long = [{"role": "user", "content": "x" * 300}]
    async with run_gateway(values) as gateway:
        members = [await gateway.begin("t", group_id="g", group_size=3) for _ in range(3)]
        for _, headers in members[:2]:
            response = await gateway.chat(headers, messages=long)
            assert response.json()["error"]["code"] == "context_length_exceeded"
        await gateway.sample(members[1][1])
    async with run_gateway(values) as gateway:
        for episode, _ in members:
            await gateway.admin.reward(episode, 1.0)
        (group,) = (await gateway.admin.leased_groups(await gateway.admin.lease("trainer"))).groups
        found = {episode.episode_id: episode.context_full for episode in group.episodes}
        assert [found[episode] for episode, _ in members] == [True, False, False]
        (refused,) = (await gateway.admin.episode(members[0][0]))["refused_calls"]
        assert (refused["status"], refused["model"]) == (400, "demo")
