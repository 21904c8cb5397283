"""Episodes: who may start, who is waited for, and who is given up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headgate.client import GatewayClient
from headgate.client.admin import GatewayRefused
from headgate.types import EpisodeMode, EpisodeSampling
from tests.harness.agents import client_of
from tests.harness.barrier import arrived, hold_after
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import result_of, until
from tests.harness.weights import fake_weights, publish

HOUR_S = 3600.0


async def free_slots(gateway: RunningGateway) -> int:
    return (await gateway.admin.status())["free_slots"]


async def refusal(gateway: RunningGateway, task: str = "late", **kwargs: object) -> GatewayRefused:
    with pytest.raises(GatewayRefused) as error:
        await gateway.admin.open_episode(task, **kwargs)
    return error.value


async def test_groups_are_admitted_within_the_staleness_bound_and_no_further(gateway: RunningGateway) -> None:
    """Batches of two and eta 1: four groups."""
    opened = [await gateway.open(f"task-{i}") for i in range(4)]
    assert await free_slots(gateway) == 0
    error = await refusal(gateway)
    assert (error.status, error.code) == (429, "no_slot")
    assert error.retry_after is not None
    assert error.retry_after >= 1
    await gateway.admin.abandon(opened[0][0], "gave up")
    await gateway.open("late")


async def test_the_members_of_a_group_share_its_slot(gateway: RunningGateway) -> None:
    before = await free_slots(gateway)
    for _ in range(3):
        await gateway.open("task", group_id="g", group_size=3)
    assert await free_slots(gateway) == before - 1
    assert (await refusal(gateway, "task", group_id="g", group_size=3)).code == "group_full"
    await gateway.open("task", group_id="h", group_size=2)
    other = await refusal(gateway, "task", group_id="h", group_size=3)
    assert (other.status, other.code) == (409, "size_differs")


async def test_opening_waits_until_a_slot_is_free(gateway: RunningGateway) -> None:
    opened = [await gateway.open(f"task-{i}") for i in range(4)]
    late = asyncio.create_task(gateway.admin.open_episode("late", wait_s=60), name="late")
    done, _ = await asyncio.wait({late}, timeout=0.2)
    assert not done
    await gateway.admin.abandon(opened[0][0], "makes room")
    assert (await result_of(late, "the episode that waits for a slot is opened")).episode_id


async def test_a_publish_makes_room_for_those_that_wait(gateway: RunningGateway, tmp_path: Path) -> None:
    for i in range(4):
        episode, headers = await gateway.open(f"task-{i}")
        await gateway.sample(headers)
        await gateway.admin.reward(episode, 1.0)
    late = asyncio.create_task(gateway.admin.open_episode("late", wait_s=60), name="late")
    lease = await gateway.admin.lease("trainer")
    new = publish(fake_weights(tmp_path / "one", "one"), tmp_path / "v1", 1, 0)
    await gateway.admin.publish(1, str(new), wait_s=60)
    await gateway.admin.ack(lease, "checkpoint-1")
    assert (await result_of(late, "the episode that waits for a slot is opened")).version == 1


async def test_waiting_for_a_slot_ends_with_a_refusal(gateway: RunningGateway) -> None:
    for i in range(4):
        await gateway.open(f"task-{i}")
    assert (await refusal(gateway, wait_s=0.3)).status == 429


async def test_eval_episodes_reserve_nothing_and_need_no_slot(gateway: RunningGateway) -> None:
    for i in range(4):
        await gateway.open(f"task-{i}")
    for i in range(5):
        episode, headers = await gateway.open(f"eval-{i}", mode="eval")
        assert (await gateway.chat(headers, max_tokens=2)).status_code == 200
        await gateway.admin.reward(episode, 1.0)
    assert await free_slots(gateway) == 0


async def test_an_idle_episode_frees_its_slot_and_one_that_is_calling_does_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    values = settings_for(
        tiny_model, tmp_path, staleness={"batch": 1, "eta": 1, "min_members": 1}, episodes={"idle_s": HOUR_S}
    )
    async with run_gateway(values) as gateway:
        await hold_after(gateway, 0)
        idle, headers = await gateway.open("idle")
        busy, busy_headers = await gateway.open("busy")
        call = asyncio.create_task(gateway.chat(busy_headers), name="busy")
        await arrived(gateway, 1)
        for live in gateway.services.episodes._live.values():
            live.last_used_at -= 2 * HOUR_S
        late = await gateway.admin.open_episode("late", wait_s=60)
        assert late.episode_id
        row = await gateway.admin.episode(idle)
        assert (row["state"], row["reason"], row["reward"]) == ("closed", "idle_deadline", None)
        assert (await gateway.chat(headers)).status_code == 409
        assert (await gateway.admin.episode(busy))["state"] == "open"
        call.cancel()
        await asyncio.wait({call})


async def test_an_episode_that_never_ends_is_ended_and_so_is_its_call(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        await hold_after(gateway, 0)
        for stream in (False, True):
            episode, headers = await gateway.open(f"endless-{stream}")
            call = asyncio.create_task(gateway.chat(headers, stream=stream), name="call")
            await arrived(gateway, 1)
            gateway.services.episodes._live[episode].opened_at -= 0.6 * HOUR_S
            slow = (await gateway.admin.status())["slow_episodes"]
            assert [row["episode_id"] for row in slow] == [episode], "it is announced"
            gateway.services.episodes._live[episode].opened_at -= HOUR_S
            response = await call

            async def ended(episode: str = episode) -> bool:
                return (await gateway.admin.episode(episode))["reason"] == "total_deadline"

            await until(ended, "the end is committed, a moment after the call is stopped")
            assert response.status_code == 409
            assert response.json()["error"]["code"] == "episode_closed"
        await until(lambda: not gateway.engine.running, "the engine stops working")


async def test_a_group_whose_last_members_never_come_is_closed(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(
        tiny_model, tmp_path, staleness={"batch": 1, "eta": 0, "min_members": 1}, episodes={"idle_s": HOUR_S}
    )
    async with run_gateway(values) as gateway:
        episode, headers = await gateway.open("task", group_id="g", group_size=2)
        await gateway.chat(headers, max_tokens=2)
        await gateway.admin.reward(episode, 1.0)
        overdue = gateway.services.episodes._group_deadlines
        await until(lambda: overdue._without_member != {}, "it is seen that none of its members runs")
        overdue._without_member = {key: since - 2 * HOUR_S for key, since in overdue._without_member.items()}
        lease = await gateway.admin.lease("trainer")
        got = await gateway.admin.leased_groups(lease, wait_s=60)
        assert [group.group_id for group in got.groups] == ["g"]
        assert got.complete


async def test_an_abandoned_episode_has_the_reason(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task")
    await gateway.admin.abandon(episode, "the agent crashed")
    row = await gateway.admin.episode(episode)
    assert (row["state"], row["reason"], row["reward"]) == ("closed", "the agent crashed", None)
    assert (await gateway.chat(headers)).status_code == 409


async def test_a_call_that_runs_when_its_episode_ends_is_refused(gateway: RunningGateway) -> None:
    assert gateway.engine is not None
    await hold_after(gateway, 2)
    episode, headers = await gateway.open("task")
    whole = asyncio.create_task(gateway.chat(headers), name="whole")
    await arrived(gateway, 1)
    await gateway.admin.reward(episode, 1.0)
    response = await whole
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "episode_closed"
    await until(lambda: gateway.engine.running == 0, "the engine stops")
    assert gateway.engine.sampled == 2


async def test_rewards_that_are_not_final_can_change(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task")
    await gateway.admin.reward(episode, 0.1, final=False)
    await gateway.admin.reward(episode, 0.2, {"format": 1.0}, final=False)
    row = await gateway.admin.episode(episode)
    assert (row["state"], row["reward"], row["components"]) == ("open", 0.2, {"format": 1.0})
    assert (await gateway.chat(headers, max_tokens=2)).status_code == 200
    await gateway.admin.reward(episode, 1.0)
    row = await gateway.admin.episode(episode)
    assert (row["state"], row["reason"], row["reward"]) == ("closed", "rewarded", 1.0)


async def test_episodes_are_listed_by_what_they_are(gateway: RunningGateway) -> None:
    first, _ = await gateway.open("a", metadata={"seed": 1})
    second, _ = await gateway.open("b", mode="eval")
    await gateway.admin.abandon(first, "done")
    assert [e["id"] for e in await gateway.admin.episodes()] == [second, first]
    assert [e["episode_id"] for e in await gateway.admin.episodes(mode="eval")] == [second]
    (closed,) = await gateway.admin.episodes(state="closed", task_id="a")
    assert closed["details"] == {"seed": 1}
    assert "key_hash" not in closed
    assert len(await gateway.admin.episodes(limit=1)) == 1


async def test_the_admin_key_is_needed_where_there_is_one(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(tiny_model, tmp_path, admin={"key": "secret"})
    async with run_gateway(values) as gateway:
        for key in (None, "wrong", "secre", "secret1"):
            async with GatewayClient(gateway.url, key) as outsider:
                for refused in (
                    outsider.open_episode("x"),
                    outsider.status(),
                    outsider.lease("x"),
                    outsider.episodes(),
                ):
                    with pytest.raises(GatewayRefused, match="401") as error:
                        await refused
                    assert error.value.code == "invalid_admin_key"
                    assert ("neither that in" in str(error.value)) is (key is not None)
        as_agent = {"authorization": "Bearer secret"}
        refusal = await gateway.chat(as_agent, messages=[{"role": "user", "content": "hi"}])
        assert (refusal.status_code, "this is the key of the admin API" in refusal.text) == (401, True)
        async with client_of(gateway, mode="eval") as (client, episode):
            with_agents_key = GatewayClient(gateway.url, client.api_key)
            with pytest.raises(GatewayRefused, match="401"):
                await with_agents_key.reward(episode, 1.0)
            await with_agents_key.close()
        assert (await gateway.http.get("/healthz")).status_code == 200


async def test_an_open_that_is_sent_again_opens_nothing_new(gateway: RunningGateway) -> None:
    again = "0123456789abcdef"
    opening = [
        gateway.admin.open_episode("t", group_id="g", group_size=2, idempotency_key=again) for _ in range(3)
    ]
    first, *others = await asyncio.gather(*opening)
    assert all(other == first for other in others)
    second = await gateway.admin.open_episode("t", group_id="g", group_size=2, idempotency_key=f"{again}-b")
    assert second.episode_id != first.episode_id and second.api_key != first.api_key
    headers = {"Authorization": f"Bearer {first.api_key}"}
    assert (await gateway.chat(headers, messages=[{"role": "user", "content": "hi"}])).status_code == 200
    with pytest.raises(GatewayRefused) as error:
        await gateway.admin.open_episode("another", group_id="g", group_size=2, idempotency_key=again)
    assert (error.value.status, error.value.code) == (409, "idempotency_key_used")
    await gateway.admin.abandon(first.episode_id, "enough")
    assert await gateway.admin.open_episode("t", group_id="g", group_size=2, idempotency_key=again) == first
    greedy, key = EpisodeSampling(temperature=0.0), f"{again}-c"
    evaluated = [
        await gateway.admin.open_episode("t", mode="eval", sampling=greedy, idempotency_key=key) for _ in "ab"
    ]
    assert evaluated[0] == evaluated[1]
    with pytest.raises(GatewayRefused, match=r"another sampling: \{.temperature.: 0\.0\}"):
        await gateway.admin.open_episode("t", mode="eval", idempotency_key=key)


@pytest.mark.parametrize(("mode", "reason", "trainable"), [("train", "rewarded", 3), ("eval", "eval", 0)])
async def test_a_final_reward_returns_its_effect(
    gateway: RunningGateway, mode: EpisodeMode, reason: str, trainable: int
) -> None:
    episode, headers = await gateway.open("t", mode=mode)
    assert (await gateway.chat(headers, max_tokens=3)).status_code == 200
    for _ in range(2):
        taken = await gateway.admin.reward(episode, 1.0)
        assert (taken["accepted"], taken["reason"], taken["trainable_tokens"]) == (True, reason, trainable)
        assert taken["notice"] == ""
    why = await gateway.admin.why(episode)
    assert why["verdict"].startswith("not trained, because it is an evaluation episode") == (mode == "eval")
    assert (await gateway.admin.episode(episode))["reason"] == "rewarded"


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_a_reward_without_any_call_does_not_count(gateway: RunningGateway, mode: EpisodeMode) -> None:
    before = await free_slots(gateway)
    episode, _ = await gateway.open("t", mode=mode)
    taken = await gateway.admin.reward(episode, 1.0)
    assert (taken["accepted"], taken["reason"], taken["trainable_tokens"]) == (False, "no_calls", 0)
    assert "OPENAI_BASE_URL" in taken["notice"]
    row = await gateway.admin.episode(episode)
    assert (row["state"], row["reason"], row["reward"]) == ("closed", "no_calls", None)
    assert row["error"] == taken["notice"]
    assert await free_slots(gateway) == before
    assert "sampled no token" in (await gateway.admin.why(episode))["verdict"]


async def test_a_member_without_a_call_has_no_part_in_its_group(gateway: RunningGateway) -> None:
    members = [await gateway.open("t", group_id="g", group_size=3) for _ in range(3)]
    for _, headers in members[:2]:
        await gateway.sample(headers)
    for (episode, _), reward in zip(members, (1.0, 0.5, 0.0), strict=True):
        await gateway.admin.reward(episode, reward)
    (group,) = (await gateway.admin.leased_groups(await gateway.admin.lease("trainer"))).groups
    assert [episode.reward for episode in group.episodes] == [1.0, 0.5]
    signals = (await gateway.http.get("/admin/v1/health")).json()["signals"]
    (signal,) = (signal for signal in signals if signal["name"] == "no_calls")
    assert (signal["value"], signal["state"]) == (pytest.approx(1 / 3), "bad")


async def test_an_attempt_that_only_crashed_calls_were_made_for_has_no_calls(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("t")
    await gateway.sample(headers)
    await gateway.admin.restart(episode)
    taken = await gateway.admin.reward(episode, 1.0)
    assert taken["reason"] == "no_calls"
    assert "the last attempt" in taken["notice"]
