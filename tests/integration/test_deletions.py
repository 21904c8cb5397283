"""One user's conversations are deleted, in whatever state they are, and what was trained from them is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import text

from gateway.store import erasure
from gateway.store.erasure import Deletion
from tests.harness.callers import Stage, assistant, chat, user
from tests.harness.scripted import scripted_gateway
from tests.harness.waiting import until

KEY = "the-key-of-the-helper"
WORDS = "unmistakable-words"
AGE = text("UPDATE episodes SET closed_at = closed_at - :s WHERE id = :id")


def settings(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "agents": {"helper": {"key": KEY, "mode": "train", "group_size": 1, "live": True}},
        "models": {"demo": {"path": str(model), "thinking": False}},
        "staleness": {"batch": 1, "eta": 2, "min_members": 1},
        **more,
    }


async def talk(stage: Stage, whose: str, text: str = WORDS, **more: Any) -> str:
    return await chat(
        stage, KEY, [user(f"{text} of {whose}")], f"yes, {text}", metadata={"user_id": whose}, **more
    )


async def delete(stage: Stage, **body: Any) -> dict[str, Any]:
    response = await stage[0].http.post("/admin/v1/deletions", json={"agent": "helper", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def deletions(stage: Stage) -> list[dict[str, Any]]:
    return (await stage[0].http.get("/admin/v1/deletions")).json()["deletions"]


def holds(folder: Path, stage_encode: Any) -> list[str]:
    """Return the files in which the words are, as text or as tokens."""
    tokens = np.asarray(stage_encode(WORDS), "<i4").tobytes()
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if WORDS.encode() in (found := path.read_bytes()) or tokens in found]


async def test_a_users_conversations_are_erased_whatever_they_are_doing(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model)) as stage:
        admin = stage[0].admin
        trained, leased, waiting = [await talk(stage, "u1") for _ in range(3)]
        other = await talk(stage, "u2", "words of another")
        for episode in (trained, leased, waiting):
            await admin.reward(episode, 1.0)
        evaluated = await talk(stage, "u1")
        first = await admin.lease("t")
        assert [
            group.episodes[0].episode_id for group in (await admin.leased_groups(first, wait_s=60)).groups
        ] == [trained]
        await admin.ack(first, "checkpoint")
        second = await admin.lease("t")
        await admin.leased_groups(second, wait_s=60)
        assert holds(tmp_path, stage[1].encode)
        report = await delete(stage, user="u1")
        assert sorted(report["episodes"]) == sorted([trained, leased, waiting, evaluated])
        assert report["done_at"] is not None
        assert [(row["version"], row["batch"], row["episodes"]) for row in report["versions"]] == [(1, 0, 1)]
        assert [(row["batch"], row["version"]) for row in report["leased"]] == [(1, 2)]
        read = (await admin.leased_groups(second)).groups[0].episodes[0]
        assert (read.reward, {node.mask_reason for node in read.nodes}) == (1.0, {"deleted"})
        row = await admin.episode(evaluated)
        assert (row["state"], row["reason"], row["notice"]) == ("closed", "deleted", "deleted")
        nodes = (await admin.trajectory(leased))["nodes"]
        assert {node["mask_reason"] for node in nodes} == {"deleted"}
        assert (await admin.episode(leased))["reward"] == 1.0
        assert (await admin.episode(other))["state"] == "open"
        assert not holds(tmp_path, stage[1].encode)
        again = await deletions(stage)
        assert [row["id"] for row in again] == [report["id"]]
        assert "u1" not in str(again)


async def test_a_killed_gateway_goes_on_with_a_deletion(tiny_model: Path, tmp_path: Path) -> None:
    """The state after a kill between two transactions: the deletion is stored, one episode is erased, one is open."""
    values = settings(tiny_model)
    async with scripted_gateway(tiny_model, tmp_path, **values) as stage:
        closed, opened = await talk(stage, "u1"), await talk(stage, "u1")
        await stage[0].admin.reward(closed, 1.0)
        created = (await stage[0].admin.episode(opened))["created_at"]
        database = stage[0].services.database.fenced(stage[0].services.coordinator.fence)
        pending = Deletion("del-1", created, None, "helper", ["u1"], [])

        def begin(connection: Any) -> None:
            erasure.add(connection, pending)
            erasure.erase(connection, "del-1", [closed])

        await stage[0].services.coordinator.erasure._lock.acquire()  # the process is as if killed here
        await database.submit(begin)
    async with scripted_gateway(tiny_model, tmp_path, **values) as stage:

        async def done() -> bool:
            return bool((await deletions(stage))[0]["done_at"])

        await until(done, "the deletion goes on")
        (report,) = await deletions(stage)
        assert report["episodes"] == [closed, opened]
        encode = stage[1].encode
    assert not holds(tmp_path, encode)


async def test_a_conversation_that_was_deleted_begins_again(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model)) as stage:
        first = await talk(stage, "u1")
        await delete(stage, all=True)
        talked = [user(f"{WORDS} of u1"), assistant(f"yes, {WORDS}"), user("and now?")]
        second = await chat(stage, KEY, talked, "hello", metadata={"user_id": "u1"})
        assert second != first
        assert (await stage[0].admin.episode(second))["notice"] == "unknown_conversation"


async def test_wrong_requests(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model)) as stage:
        for body in (
            {"agent": "helper"},
            {"agent": "helper", "user": "u", "all": True},
            {"user": "u"},
            {"agent": ""},
        ):
            response = await stage[0].http.post("/admin/v1/deletions", json=body)
            assert response.status_code in (400, 422), response.text
        report = await delete(stage, user="unknown")
        assert (report["episodes"], report["versions"], report["leased"]) == ([], [], [])


async def test_contents_expire_and_numbers_stay(tiny_model: Path, tmp_path: Path) -> None:
    """But for what a batch needs. The versions are named as for a deletion on request."""
    values = settings(tiny_model)
    values["agents"]["helper"]["keep_days"] = 1.0
    async with scripted_gateway(tiny_model, tmp_path, **values) as stage:
        admin = stage[0].admin
        trained, waiting = await talk(stage, "u1"), await talk(stage, "u1", "words of a batch")
        for episode in (trained, waiting):
            await admin.reward(episode, 1.0)
        first = await admin.lease("t")
        await admin.leased_groups(first, wait_s=60)
        await admin.ack(first, "checkpoint-1")
        await admin.lease("t")
        young = await talk(stage, "u1", "words of today")
        await admin.abandon(young, "left")
        database = stage[0].services.database
        ages = {trained: 2, waiting: 2, young: 0.5}
        for episode, days in ages.items():
            await database.submit(lambda c, e=episode, s=days * 86_400: c.execute(AGE, {"id": e, "s": s}))
        await database.submit(
            lambda c: c.execute(text("UPDATE leases SET checkpoint = '' WHERE state = 'acked'"))
        )
        await stage[0].services.coordinator.erasure.expire()
        notices = [(await admin.episode(episode))["notice"] for episode in ages]
        assert notices == ["deleted", "", ""]
        row = await admin.episode(trained)
        assert (row["reward"], row["calls"][0]["completion_tokens"] > 0) == (1.0, True)
        (report,) = await deletions(stage)
        assert report["episodes"] == [trained]
        assert [row["version"] for row in report["versions"]] == [1]
        assert report["leased"] == []
        await stage[0].services.coordinator.erasure.expire()
        assert await deletions(stage) == [report]
