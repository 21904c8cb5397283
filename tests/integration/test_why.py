"""The story of an episode in order, and one line with its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate.client.admin import GatewayRefused
from headgate.types import EpisodeMode, TokenFlag
from scheduler.policies.staleness_events import Publish
from tests.harness.gateways import RunningGateway, run_gateway, settings_for


@pytest.fixture
async def strict(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """One group a batch, no staleness at all, groups of two."""
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 1, "eta": 0, "min_members": 2})
    async with run_gateway(values) as running:
        yield running


async def sampled(gateway: RunningGateway, group: str, size: int = 1, calls: int = 1, **body: Any) -> str:
    """Return an episode with `calls` calls."""
    episode, headers = await gateway.open(group, group_id=group, group_size=size)
    for _ in range(calls):
        assert (await gateway.chat(headers, max_tokens=5, **body)).status_code == 200
    return episode


async def trained(gateway: RunningGateway, batch: int) -> None:
    lease = await gateway.admin.lease("trainer")
    assert lease.batch == batch
    await gateway.admin.ack(lease, f"checkpoint-{batch}")


def kinds(why: dict[str, Any]) -> list[str]:
    return [step["kind"] for step in why["story"]]


async def test_a_trained_episode_shows_all_its_steps(gateway: RunningGateway) -> None:
    one, two = await sampled(gateway, "a"), await sampled(gateway, "b")
    assert (await gateway.admin.why(one))["verdict"] == "still running"
    await gateway.admin.reward(one, 0.5)
    assert (await gateway.admin.why(one))["verdict"] == "waiting in batch 0, as number 1"
    await gateway.admin.reward(two, 1.0)
    await trained(gateway, 0)
    why = await gateway.admin.why(one)
    assert why["verdict"] == "trained in batch 0 as version 1"
    assert (why["episode_id"], why["group_id"], why["model"]) == (one, "a", "demo")
    assert (why["sampled_tokens"], why["masked_tokens"]) == (5, {})
    assert kinds(why) == ["admitted", "rewarded", "occupied", "trained"]
    admitted, rewarded, occupied, last = why["story"]
    assert admitted["words"] == "admitted to batch 1, because it has a place for a group of version 0"
    assert rewarded["words"] == "rewarded with 0.5"
    assert (occupied["batch"], occupied["entry"]) == (last["batch"], last["entry"]) == (0, 0)
    assert (await gateway.admin.why(two))["story"][-1]["entry"] == 1
    assert [step["at"] for step in why["story"]] == sorted(step["at"] for step in why["story"])


async def test_tokens_that_were_not_trained_are_counted_by_reason(gateway: RunningGateway) -> None:
    greedy, drawn = await sampled(gateway, "a", 2, calls=2, temperature=0), await sampled(gateway, "a", 2)
    mixed, sibling = await sampled(gateway, "b", 2, top_p=0.5), await sampled(gateway, "b", 2)
    for episode in (greedy, drawn, mixed, sibling):
        await gateway.admin.reward(episode, 1.0)
    assert (await gateway.admin.why(greedy))["masked_tokens"] == {"greedy": 10}
    await trained(gateway, 0)
    why = await gateway.admin.why(greedy)
    assert why["verdict"] == "trained in batch 0 as version 1, but none of its tokens counted"
    (masked,) = [step for step in why["story"] if step["kind"] == "masked"]
    assert (masked["reason"], masked["details"], masked["batch"]) == ("greedy", {"tokens": 10}, 0)
    assert (await gateway.admin.why(mixed))["masked_tokens"] == {"truncated": 5}


async def test_a_group_of_which_nothing_can_be_trained_takes_no_place(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    two = [await sampled(gateway, "a", 2, temperature=0), await sampled(gateway, "a", 2, top_p=0.5)]
    taken = [await gateway.admin.reward(episode, float(i)) for i, episode in enumerate(two)]
    assert [(one["accepted"], one["trainable_tokens"]) for one in taken] == [(True, 0)] * 2
    assert "5 greedy" in taken[0]["notice"] and "temperature = { override = 1.0 }" in taken[0]["notice"]
    why = await gateway.admin.why(two[0])
    assert kinds(why) == ["admitted", "rewarded", "dropped"]
    assert (why["story"][-1]["about"], why["story"][-1]["reason"]) == ("group", "nothing_to_train")
    assert why["verdict"].startswith("not trained, because no token of the group's rewarded episodes can be")
    signals = (await gateway.http.get("/admin/v1/health")).json()["signals"]
    (signal,) = (signal for signal in signals if signal["name"] == "untrainable_groups")
    assert (signal["value"], signal["state"]) == (1.0, "bad")
    warned = [record.getMessage() for record in caplog.records if "are not trained" in record.getMessage()]
    assert len(warned) == 2, "the first greedy call and the first with top_p, and no later one"
    assert "[sampling] temperature" in warned[0] and "top_p" in warned[1]


async def test_a_greedy_evaluation_counts(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    episode, headers = await gateway.open("t", mode="eval")
    await gateway.sample(headers, temperature=0)
    assert (await gateway.admin.reward(episode, 1.0))["accepted"]
    assert "not trained" not in caplog.text


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_refused_calls_are_a_part_of_their_episode(gateway: RunningGateway, mode: EpisodeMode) -> None:
    episode, headers = await gateway.open("t", mode=mode)
    for _ in range(3):
        assert (await gateway.chat(headers, temperature="hot")).status_code == 400
    assert (await gateway.chat(headers, stop=[""] * 9)).status_code == 400
    shown = (await gateway.admin.episode(episode))["refused_calls"]
    assert [(row["status"], row["code"], row["times"], row["api"]) for row in shown] == [
        (400, "invalid_value", 3, "chat"),
        (400, "invalid_value", 1, "chat"),
    ]
    why = await gateway.admin.why(episode)
    refusals = [step for step in why["story"] if step["kind"] == "call_refused"]
    assert [step["about"] for step in refusals] == ["call", "call"]
    assert refusals[0]["words"].startswith("a call was refused (400 invalid_value, 3 times): temperature")
    metrics = (await gateway.http.get("/metrics")).text
    assert 'headgate_refused_calls_total{api="chat",code="invalid_value"} 4.0' in metrics
    taken = await gateway.admin.reward(episode, 1.0)
    if mode == "eval":
        assert taken["accepted"], "the agent did call, and its score counts"
    else:
        assert taken["reason"] == "no_calls"
        assert "4 calls of the agent were refused" in taken["notice"] and "stop" in taken["notice"]
        why = await gateway.admin.why(episode)
        assert "sampled no token" in why["verdict"] and why["error"] == taken["notice"]
        assert "OPENAI_BASE_URL" not in str(why), "calls came, so the agent has its address"


async def test_an_abandoned_episode_has_the_reason_of_its_driver(strict: RunningGateway) -> None:
    gone, left = await sampled(strict, "a", 2), await sampled(strict, "a", 2)
    await strict.admin.abandon(gone, "out of quota")
    await strict.admin.reward(left, 1.0)
    assert (await strict.admin.why(gone))["verdict"] == "not trained, because out of quota"
    why = await strict.admin.why(left)
    assert kinds(why) == ["admitted", "rewarded", "dropped"]
    assert (why["story"][-1]["about"], why["story"][-1]["reason"]) == ("group", "too_few_rewards")
    assert why["verdict"].startswith("not trained, because too few of the group's episodes were rewarded")


async def test_a_refused_episode_is_known_though_it_was_never_opened(strict: RunningGateway) -> None:
    await sampled(strict, "a", 2)
    with pytest.raises(GatewayRefused):
        await strict.open("b", group_id="b")
    assert (await strict.admin.staleness())["lost"] == [{"kind": "refused", "reason": "no_slot", "count": 1}]
    refused = await strict.services.database.read(
        lambda c: c.exec_driver_sql("SELECT episode_id FROM decisions WHERE kind = 'refused'").scalar_one()
    )
    why = await strict.admin.why(refused)
    assert (why["group_id"], kinds(why)) == ("b", ["refused"])
    assert why["verdict"] == "not trained, because no slot was free within the staleness bound"


async def test_a_name_of_a_group_that_is_used_again_has_two_stories(strict: RunningGateway) -> None:
    first = [await sampled(strict, "a", 2) for _ in range(2)]
    for episode in first:
        await strict.admin.reward(episode, 1.0)
    await trained(strict, 0)
    await strict.as_if_published(1)
    again = [await sampled(strict, "a", 2) for _ in range(2)]
    await strict.admin.reward(again[0], 1.0)
    await strict.admin.abandon(again[1], "crashed")
    assert (await strict.admin.why(first[0]))["verdict"] == "trained in batch 0 as version 1"
    why = await strict.admin.why(again[0])
    assert kinds(why) == ["admitted", "rewarded", "dropped"]
    assert [group.group_id for group in await strict.admin.batch_groups(0)] == ["a"]
    (group,) = await strict.admin.batch_groups(0)
    assert [episode.episode_id for episode in group.episodes] == first


async def test_evaluation_and_the_unknown(gateway: RunningGateway) -> None:
    episode, _ = await gateway.open("a", mode="eval")
    why = await gateway.admin.why(episode)
    assert (why["verdict"], why["story"]) == ("not trained, because it is an evaluation episode", [])
    with pytest.raises(GatewayRefused) as error:
        await gateway.admin.why("ep-unknown")
    assert (error.value.status, error.value.code) == (404, "no_episode")


async def test_late_tokens_are_flagged_and_the_rest_of_the_group_counts(
    tiny_model: Path, tmp_path: Path
) -> None:
    staleness = {"batch": 1, "eta": 0, "min_members": 1, "late_groups": "mask"}
    async with run_gateway(settings_for(tiny_model, tmp_path, staleness=staleness)) as gateway:
        episode, headers = await gateway.open("a", group_id="a")
        assert (await gateway.chat(headers, max_tokens=5)).status_code == 200
        await gateway.model.ledger.apply(Publish(1))
        await gateway.admin.reward(episode, 1.0)
        lease = await gateway.admin.lease("trainer")
        (group,) = (await gateway.admin.leased_groups(lease)).groups
        (turn,) = [node for node in group.episodes[0].nodes if node.sampled]
        assert (lease.batch, group.batch, group.version) == (1, 1, 0)
        assert turn.flags.tolist() == [TokenFlag.LATE] * 5
        await gateway.admin.ack(lease, "checkpoint")
        why = await gateway.admin.why(episode)
        assert kinds(why) == ["admitted", "late", "rewarded", "occupied", "masked", "trained"]
        assert why["masked_tokens"] == {"late": 5}
        assert why["verdict"] == "trained in batch 1 as version 2, but none of its tokens counted"
