"""Agents in daily use: whatever training needs, no user is refused and no conversation ends for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.policies.staleness_events import Publish
from tests.harness.callers import Stage, assistant, chat, code, notice_of, send, user
from tests.harness.scripted import scripted_gateway
from tests.harness.waiting import until

HELPER, SHY, OTHER = "the-key-of-the-helper", "the-key-of-the-shy-one", "the-key-of-another-one"
NO, YES = {"X-Headgate-Train": "no"}, {"X-Headgate-Train": "yes"}


@pytest.fixture
async def stage(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    train: dict[str, Any] = {"mode": "train", "group_size": 1, "live": True}
    agents = {
        "helper": {"key": HELPER, **train, "idle_s": 0.2},
        "shy": {"key": SHY, **train, "consent": "required"},
        "other": {"key": OTHER, **train},
    }
    async with scripted_gateway(
        tiny_model,
        tmp_path,
        agents=agents,
        models={"demo": {"path": str(tiny_model), "thinking": False}},
        staleness={"batch": 2, "eta": 1, "min_members": 1},
        graders={"next": {"function": "tests.harness.graders:thanked"}},
    ) as running:
        yield running


async def mode_of(stage: Stage, episode: str) -> tuple[str, str, str]:
    row = await stage[0].admin.episode(episode)
    return row["mode"], row["state"], row["notice"]


async def test_a_hundred_users_and_no_trainer(stage: Stage) -> None:
    """Four conversations find a slot; the others are served all the same."""
    stage[1].replies.extend(["yes"] * 100)
    responses = await asyncio.gather(*(send(stage, OTHER, [user(f"hi {n}")]) for n in range(100)))
    assert {response.status_code for response in responses} == {200}
    rows = [await mode_of(stage, response.headers["x-headgate-episode"]) for response in responses]
    assert Counter(rows) == {("train", "open", ""): 4, ("eval", "open", "no_slot"): 96}


async def test_a_conversation_that_training_gives_up_keeps_its_episode(stage: Stage) -> None:
    talk = [user("how long?")]
    first = await chat(stage, OTHER, talk, "long")
    assert await mode_of(stage, first) == ("train", "open", "")
    for version in (1, 2, 3):
        await stage[0].model.ledger.apply(Publish(version))
    assert await mode_of(stage, first) == ("eval", "open", "stale")
    talk += [assistant("long"), user("thanks")]
    assert await chat(stage, OTHER, talk, "welcome") == first
    episodes = stage[0].services.coordinator.episodes
    await episodes.finish(first, 60.0)
    row = await stage[0].admin.episode(first)
    assert (row["state"], row["reason"], row["reward"]) == ("closed", "rewarded", 1.0)


async def test_who_does_not_agree_is_not_trained(stage: Stage) -> None:
    assert await mode_of(stage, await chat(stage, SHY, [user("a")])) == ("eval", "open", "no_consent")
    assert await mode_of(stage, await chat(stage, SHY, [user("b")], headers=YES)) == ("train", "open", "")
    assert (await mode_of(stage, await chat(stage, OTHER, [user("c")], headers=NO)))[2] == "no_consent"
    by_metadata = await chat(stage, OTHER, [user("d")], metadata={"train": "false"})
    assert (await mode_of(stage, by_metadata))[2] == "no_consent"
    assert code(await send(stage, OTHER, [user("e")], headers={"X-Headgate-Train": "maybe"})) == (
        400,
        "invalid_value",
    )


async def test_who_disagrees_later_takes_the_conversation_out_of_its_batch(stage: Stage) -> None:
    first = await chat(stage, OTHER, [user("my name is"), assistant("?"), user("A")], "B", headers=YES)
    talk = [user("my name is"), assistant("?"), user("A"), assistant("B"), user("forget it")]
    assert await chat(stage, OTHER, talk, "done", headers=NO) == first
    assert await mode_of(stage, first) == ("eval", "open", "no_consent")
    groups = stage[0].model.ledger.rule.groups()
    assert [group.state for group in groups] == ["dropped"]
    named = await chat(stage, OTHER, [user("another")], "C", headers=YES)
    await chat(stage, OTHER, [user("no, rather not")], headers={**NO, "X-Headgate-Episode": named})
    assert await mode_of(stage, named) == ("eval", "open", "no_consent")


async def test_feedback_rewards_a_reply_by_its_id(stage: Stage) -> None:
    stage[1].replies.append("42")
    reply = await send(stage, OTHER, [user("what is 6 times 7?")])
    call, episode = reply.json()["id"], reply.headers["x-headgate-episode"]

    async def post(key: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return await stage[0].http.post("/v1/feedback", json=body, headers=headers)

    posted = await post(OTHER, id=call, reward=0.5)
    assert posted.json() == {"id": call, "episode_id": episode, "reward": 0.5, "outcome": "open"}
    assert (await stage[0].admin.episode(episode))["calls"][0]["reward"] == 0.5
    assert code(await post(SHY, id=call, reward=1.0)) == (404, "no_call")
    assert code(await post(OTHER, id="chatcmpl-none", reward=1.0)) == (404, "no_call")
    assert code(await post(OTHER, id=call, reward="good")) == (400, "invalid_value")
    opened = await stage[0].admin.open_episode("task")
    assert code(await post(opened.api_key, id=call, reward=1.0)) == (403, "not_live")


async def test_the_users_next_message_judges_a_conversation_and_silence_judges_nothing(stage: Stage) -> None:
    silent = await chat(stage, HELPER, [user("one question")], "an answer")
    talk = [user("another question"), assistant("the answer"), user("thanks")]
    praised = await chat(stage, HELPER, talk[:1], "the answer")
    assert await chat(stage, HELPER, talk, "welcome") == praised
    rows: dict[str, Any] = {}

    async def closed() -> bool:
        await stage[0].services.coordinator.episodes.sweep()
        rows.update({name: await stage[0].admin.episode(name) for name in (silent, praised)})
        return all(row["state"] == "closed" for row in rows.values())

    await until(closed, "both conversations end by silence")
    assert (rows[silent]["reason"], rows[silent]["reward"]) == ("not_judged", None)
    assert (rows[praised]["reason"], rows[praised]["reward"]) == ("rewarded", 1.0)
    assert await notice_of(stage, praised) == ""
