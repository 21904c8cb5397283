"""Wrong rewards, on every route of a running gateway: refused by name, and nothing of them is stored."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.gateways import RunningGateway, run_gateway, settings_for

NO_NUMBERS = ['"0.5"', "true", "false", "null", "[1]", "NaN", "Infinity", "1e999", "1" + "0" * 400]
LONG_S = 300.0


@pytest.fixture
async def bounded(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """Rewards are between -1 and 2; one group of two makes a batch; a grader returns the value of the metadata."""
    values = settings_for(
        tiny_model,
        tmp_path,
        rewards={"min": -1.0, "max": 2.0},
        staleness={"batch": 1, "eta": 0},
        graders={"value": {"function": "tests.harness.graders:constant", "retries": 0}},
    )
    async with run_gateway(values) as gateway:
        yield gateway


async def called(gateway: RunningGateway, headers: dict[str, str]) -> str:
    return str((await gateway.chat(headers, max_tokens=2)).json()["id"])


async def post(gateway: RunningGateway, path: str, body: str) -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json"}
    response = await gateway.http.post(f"/admin/v1/episodes/{path}", content=body, headers=headers)
    return response.status_code, response.json()


async def refused(gateway: RunningGateway, path: str, body: str, words: str) -> None:
    status, response = await post(gateway, path, body)
    assert status == 400, response
    assert "reward" in response["error"]["param"]
    assert words in response["error"]["message"]


async def test_a_reward_that_is_not_a_number_is_refused_on_every_route(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task")
    call = await called(gateway, headers)
    for value in NO_NUMBERS:
        for path, body in (
            (f"{episode}/reward", f'{{"reward": {value}}}'),
            (f"{episode}/reward", f'{{"reward": {value}, "final": false}}'),
            (f"{episode}/reward", f'{{"reward": 1, "components": {{"form": {value}}}}}'),
            (f"{episode}/calls/{call}/reward", f'{{"reward": {value}}}'),
        ):
            status, response = await post(gateway, path, body)
            assert status == 400, (body, response)
    row = await gateway.admin.episode(episode)
    assert (row["state"], row["reward"], [c["reward"] for c in row["calls"]]) == ("open", None, [None])


async def test_rewards_out_of_bounds_are_refused_by_name_and_so_are_their_sums(
    bounded: RunningGateway,
) -> None:
    episode, headers = await bounded.open("task", mode="eval")
    one, two = await called(bounded, headers), await called(bounded, headers)
    of_one, of_two, own = (
        f"{episode}/calls/{one}/reward",
        f"{episode}/calls/{two}/reward",
        f"{episode}/reward",
    )
    for value in (2.5, -1.5, 1e308, -1e308):
        for path in (own, of_one):
            await refused(bounded, path, json.dumps({"reward": value}), "[rewards] allows -1 to 2")
    assert (await post(bounded, of_one, '{"reward": 1.5}'))[0] == 200
    await refused(bounded, of_two, '{"reward": 1}', "the sum")
    assert (await post(bounded, of_one, '{"reward": 0.5}'))[0] == 200, "in place of the one before"
    assert (await post(bounded, of_two, '{"reward": 1}'))[0] == 200
    await refused(bounded, own, '{"reward": 1}', "the sum")
    await refused(bounded, own, '{"reward": 1, "final": false}', "the sum")
    assert (await post(bounded, own, '{"reward": 0.5}'))[0] == 200
    row = await bounded.admin.episode(episode)
    assert (row["reason"], row["reward"]) == ("rewarded", 2.0)


async def test_a_gateway_without_settings_refuses_what_makes_nan_of_weights(gateway: RunningGateway) -> None:
    episode, _ = await gateway.open("task")
    await refused(gateway, f"{episode}/reward", '{"reward": 1e308}', "[rewards]")
    assert (await post(gateway, f"{episode}/reward", '{"reward": 1000}'))[0] == 200


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_a_grade_out_of_bounds_drops_the_episode_with_the_reason(
    bounded: RunningGateway, mode: Any
) -> None:
    for grade, call_reward, reason in (
        (5.0, None, "value: the reward 5 is not allowed: [rewards] allows -1 to 2"),
        (1e308, None, "[rewards]"),
        (True, None, "a number, not True"),
        ("0.5", None, "a number, not '0.5'"),
        (1.5, 1.0, "the sum of the grade and of the rewards posted on calls: the reward 2.5 is not allowed"),
    ):
        episode, headers = await bounded.begin("task", metadata={"value": grade}, mode=mode)
        if call_reward is not None:
            await bounded.admin.call_reward(episode, await called(bounded, headers), call_reward)
        fate = await bounded.admin.close_episode(episode, wait_s=LONG_S)
        assert (fate["state"], fate["reason"], fate["reward"]) == ("closed", "grading_failed", None)
        assert reason in (await bounded.admin.episode(episode))["error"]
        assert reason in (await bounded.admin.why(episode))["error"]
        assert (await bounded.admin.status())["free_slots"] == 1


async def test_an_agent_that_failed_frees_its_place_and_a_batch_still_fills(bounded: RunningGateway) -> None:
    """A group of three of which one failed is trained with two; its error is kept, shortened, with its beginning and its end."""
    error_text = "ValueError: at first\n" + "x" * 50_000 + "\nat last \0"
    members = [await bounded.open("task", group_id="g", group_size=3) for _ in range(3)]
    assert (await bounded.admin.status())["free_slots"] == 0
    for (episode, headers), reward in zip(members, (None, 0.0, 1.0), strict=True):
        await called(bounded, headers)
        if reward is None:
            await bounded.admin.abandon(episode, "agent_failed", error_text)
        else:
            await bounded.admin.reward(episode, reward)
    lease = await bounded.admin.lease("trainer")
    (group,) = (await bounded.admin.leased_groups(lease, wait_s=LONG_S)).groups
    assert sorted(e.reward for e in group.episodes) == [0.0, 1.0]
    why = await bounded.admin.why(members[0][0])
    assert why["verdict"] == "not trained, because its agent ended without a reward"
    error = why["error"]
    assert error.startswith("ValueError: at first\n")
    assert error.endswith("\nat last \0")
    assert len(error) <= 4000
    alone = [await bounded.open("other", group_id="h", group_size=2, mode="eval") for _ in range(2)]
    for episode, _ in alone:
        await bounded.admin.abandon(episode, "agent_failed", "boom")
        assert (await bounded.admin.why(episode))["error"] == "boom"
