"""Feedback that comes after a conversation's end: no place is held for it, and no user is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import text

from scheduler.policies.staleness_events import Publish
from tests.harness.callers import Stage, code, notice_of, send, user
from tests.harness.scripted import scripted_gateway
from tests.harness.waiting import until

KEY = "the-key-of-the-helper"


def settings(model: Path, **agent: Any) -> dict[str, Any]:
    given = {"key": KEY, "mode": "train", "group_size": 1, "live": True, "idle_s": 0.3, "feedback_s": 3600.0}
    return {
        "agents": {"helper": {**given, **agent}},
        "models": {"demo": {"path": str(model), "thinking": False}},
        "staleness": {"batch": 2, "eta": 1, "min_members": 1},
    }


async def converse(stage: Stage, *words: str) -> list[tuple[str, str]]:
    """Return the episode and the call of each conversation, once all of them are over."""
    stage[1].replies.extend(["so"] * len(words))
    responses = await asyncio.gather(*(send(stage, KEY, [user(word)]) for word in words))
    assert {response.status_code for response in responses} == {200}

    async def over() -> bool:
        return (
            not stage[0].services.episodes.open_count
            and not stage[0].services.coordinator.episodes._closing.unclosed
        )

    await until(over, "the conversations are over")
    return [(response.headers["x-headgate-episode"], response.json()["id"]) for response in responses]


async def over(stage: Stage, word: str) -> tuple[str, str]:
    """Return the episode and the call of a conversation that is over, as if its time of silence had passed."""
    stage[1].replies.append("so")
    response = await send(stage, KEY, [user(word)])
    episode = response.headers["x-headgate-episode"]
    await stage[0].admin.abandon(episode, "idle_deadline")
    return episode, response.json()["id"]


async def press(stage: Stage, call: str, reward: float = 1.0) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    return await stage[0].http.post("/v1/feedback", json={"id": call, "reward": reward}, headers=headers)


async def outcome(stage: Stage, call: str, reward: float = 1.0) -> str:
    response = await press(stage, call, reward)
    assert response.status_code == 200, response.text
    return response.json()["outcome"]


async def ends(stage: Stage, *episodes: str) -> list[tuple[str, str, float | None]]:
    rows = [await stage[0].admin.episode(episode) for episode in episodes]
    return [(row["mode"], row["reason"], row["reward"]) for row in rows]


async def test_it_is_trained_in_a_batch_that_has_a_place(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model)) as stage:
        (one, call), (other, second) = await converse(stage, "one", "two")
        assert stage[0].model.ledger.rule.free_slots() == 4, "what is over holds no place"
        assert [await outcome(stage, call), await outcome(stage, second, -1.0)] == ["rewarded", "rewarded"]
        assert await ends(stage, one, other) == [("train", "rewarded", 1.0), ("train", "rewarded", -1.0)]
        lease = await stage[0].admin.lease("t")
        groups = (await stage[0].admin.leased_groups(lease, wait_s=60)).groups
        assert {(e.episode_id, e.reward) for group in groups for e in group.episodes} == {
            (one, 1.0),
            (other, -1.0),
        }
        assert code(await press(stage, call)) == (409, "episode_closed"), "it may be trained already"
        await stage[0].admin.ack(lease, "checkpoint")
        assert (await stage[0].admin.batches())[0]["groups"] == 2


async def test_a_hundred_users_and_no_trainer(tiny_model: Path, tmp_path: Path) -> None:
    """Their feedback fills the batches that may be filled; the rest waits, through a restart, until it is too old."""
    values = settings(tiny_model, idle_s=3600.0)
    async with scripted_gateway(tiny_model, tmp_path, **values) as stage:
        talks = [await over(stage, f"hi {n}") for n in range(100)]
        found = Counter([await outcome(stage, call) for _, call in talks])
        assert found == {"rewarded": 4, "waits": 96}
        assert stage[0].services.coordinator.late_feedback.waiting() == 96
    async with scripted_gateway(tiny_model, tmp_path, **values) as stage:
        late = stage[0].services.coordinator.late_feedback
        assert late.waiting() == 96
        lease = await stage[0].admin.lease("t")
        await stage[0].admin.ack(lease, "checkpoint")
        await stage[0].model.ledger.apply(Publish(1))
        assert late.waiting() == 96, "the bound of version 0 ends with batch 1, which is full"
        await stage[0].model.ledger.apply(Publish(2))
        await until(lambda: late.waiting() == 0, "what is too old is recorded as evaluation")
        rows = [await stage[0].admin.episode(episode) for episode, _ in talks]
        assert Counter((row["mode"], row["reason"], row["notice"]) for row in rows) == {
            ("train", "rewarded", ""): 4,
            ("eval", "rewarded", "stale"): 96,
        }


async def test_what_waits_gets_the_next_free_place(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model, idle_s=3600.0)) as stage:
        episode, call = await over(stage, "first")
        stage[1].replies.extend(["so"] * 4)
        held = [(await send(stage, KEY, [user(f"held {n}")])).headers["x-headgate-episode"] for n in range(4)]
        assert await outcome(stage, call) == "waits"
        assert await outcome(stage, call, 0.5) == "waits", "a later reward replaces an earlier one"
        await stage[0].admin.abandon(held[0], "left")
        await until(lambda: not stage[0].services.coordinator.late_feedback.waiting(), "it has a place")
        assert await ends(stage, episode) == [("train", "rewarded", 0.5)]


async def test_evaluations_too_late_and_wrong_feedback(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model)) as stage:
        stage[1].replies.append("so")
        refused = await send(stage, KEY, [user("no")], headers={"X-Headgate-Train": "no"})
        ((late, call),) = await converse(stage, "late")
        assert await outcome(stage, refused.json()["id"]) == "eval"
        assert await ends(stage, refused.headers["x-headgate-episode"]) == [("eval", "rewarded", 1.0)]
        assert await notice_of(stage, refused.headers["x-headgate-episode"]) == "no_consent"
        assert code(await press(stage, call, 1e9)) == (400, "invalid_value")
        assert code(await press(stage, "chatcmpl-none")) == (404, "no_call")
        await stage[0].services.database.submit(
            lambda c: c.execute(text("UPDATE episodes SET closed_at = closed_at - 7200"))
        )
        assert code(await press(stage, call)) == (409, "episode_closed")
        assert await ends(stage, late) == [("train", "idle_deadline", None)]
