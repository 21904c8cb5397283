"""Calls of agents' keys that are sent again, and those that open training episodes: who gets which episode."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.callers import KEYS, Stage, assistant, chat, code, notice_of, send, user
from tests.harness.gateways import RunningGateway
from tests.harness.retries import RETRY
from tests.harness.scripted import ScriptedEngine, scripted_gateway
from tests.harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
async def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    agents = {"ann": {"key": KEYS["ann"]}, "few": {"key": KEYS["few"], "max_episodes": 1}}
    work = tmp_path_factory.mktemp("again")
    async with scripted_gateway(tiny_model, work, agents=agents) as running:
        yield running


class Gate:
    """Requests to the engine wait while it is shut."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine, self.open, self.waiting = engine, asyncio.Event(), 0
        self._generate = engine.generate

    def __enter__(self) -> Gate:
        self.engine.generate = self._held  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self.engine.generate = self._generate  # type: ignore[method-assign]

    async def _held(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        async for event in self._generate(body):
            yield event


async def drop(stage: Stage, gate: Gate, content: str, **more: Any) -> None:
    """Send a call that opens an episode, and disconnect before the engine has sampled anything."""
    before = gate.waiting
    call = asyncio.create_task(send(stage, "ann", [user(content)], **more), name="dropped")
    await until(lambda: gate.waiting > before, "the engine has the request")
    call.cancel()
    await until(lambda: gate.waiting == before, "the engine was stopped")


def of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-headgate-episode"]


async def begun_with(stage: Stage, content: str) -> list[str]:
    """Return the open episodes whose first call had this content, the oldest first."""
    found = []
    for row in (await stage[0].admin.episodes(agent="ann", state="open"))[::-1]:
        calls = (await stage[0].admin.episode(row["id"]))["calls"]
        found += [row["id"]] if calls and calls[0]["requested"].get("user") == content else []
    return found


async def test_a_client_that_comes_back_finds_the_episode_that_it_opened(stage: Stage) -> None:
    with Gate(stage[1]) as gate:
        await drop(stage, gate, "lost", user="lost")
        stage[1].replies.append("found")
        gate.open.set()
        response = await send(stage, "ann", [user("lost")], user="lost", headers=RETRY)
    assert response.json()["choices"][0]["message"]["content"] == "found"
    assert await begun_with(stage, "lost") == [of(response)]
    calls = (await stage[0].admin.episode(of(response)))["calls"]
    assert [call["finish_reason"] for call in calls] == ["stop"], "the same reply went on"


async def test_a_retry_among_equal_calls_finds_the_one_that_lost_its_client(stage: Stage) -> None:
    happy = await chat(stage, "ann", [user("sample")], "one", user="sample")
    with Gate(stage[1]) as gate:
        await drop(stage, gate, "sample", user="sample")
        stage[1].replies.append("two")
        gate.open.set()
        response = await send(stage, "ann", [user("sample")], user="sample", headers=RETRY)
    assert of(response) != happy
    assert response.json()["choices"][0]["message"]["content"] == "two"
    assert await begun_with(stage, "sample") == [happy, of(response)]


async def test_a_reply_that_was_given_and_did_not_arrive_is_given_again(stage: Stage) -> None:
    stage[1].replies.append("once")
    first = await send(stage, "ann", [user("lost on the way")])
    again = await send(stage, "ann", [user("lost on the way")], headers=RETRY)
    assert of(again) == of(first)
    assert again.json()["choices"] == first.json()["choices"]
    assert again.json()["id"] == first.json()["id"]
    stage[1].replies.append("twice")
    other = await send(stage, "ann", [user("lost on the way")])
    assert of(other) != of(first), "a request that is not marked as a retry gets its own sample"


async def test_a_retry_is_not_given_a_conversation_that_has_gone_on(stage: Stage) -> None:
    first = await chat(stage, "ann", [user("went on")], "yes")
    assert await chat(stage, "ann", [user("went on"), assistant("yes"), user("next")]) == first
    assert await chat(stage, "ann", [user("went on")], "new", headers=RETRY) != first


async def test_a_retry_that_could_repeat_several_calls_opens_an_episode_with_a_notice(stage: Stage) -> None:
    two = {await chat(stage, "ann", [user("twin")], "a"), await chat(stage, "ann", [user("twin")], "b")}
    third = await chat(stage, "ann", [user("twin")], "c", headers=RETRY)
    assert third not in two
    assert await notice_of(stage, third) == "ambiguous_retry"


async def test_a_call_that_was_refused_comes_back_as_a_sample_of_its_own(stage: Stage) -> None:
    """Refusals are what training receives when all slots are taken: were a retry one with its equals, groups would collapse."""
    first = await chat(stage, "few", [user("equal")], "x")
    assert code(await send(stage, "few", [user("equal")])) == (429, "too_many_episodes")
    assert code(await send(stage, "few", [user("equal")], headers=RETRY)) == (429, "too_many_episodes")
    await stage[0].admin.reward(first, 1.0)
    await chat(stage, "few", [user("equal")], "y", headers=RETRY)
    response = await send(stage, "few", [user("equal")], headers=RETRY)
    assert response.json()["choices"][0]["message"]["content"] == "y", (
        "a second retry repeats the second call"
    )


async def test_equal_idempotency_keys_are_one_call_however_they_come(stage: Stage) -> None:
    key = {"Idempotency-Key": "k-1"}
    with Gate(stage[1]) as gate:
        calls = [
            asyncio.create_task(send(stage, "ann", [user("together")], headers=key), name=f"call-{i}")
            for i in range(4)
        ]
        await until(lambda: gate.waiting > 0, "the engine has the request")
        stage[1].replies.append("one for all")
        gate.open.set()
        responses = await asyncio.gather(*calls)
    assert len({of(response) for response in responses}) == 1
    assert len({response.json()["id"] for response in responses}) == 1
    later = await send(stage, "ann", [user("together")], headers=key)
    assert later.json()["id"] == responses[0].json()["id"]
    reused = await send(stage, "ann", [user("another body")], headers=key)
    assert reused.status_code == 422
    made_up = [user("u"), assistant("never sampled"), user("v")]
    stage[1].replies += ["once", "not twice"]
    again = [send(stage, "ann", made_up, headers={"Idempotency-Key": "k-2"}) for _ in range(4)]
    unknown = await asyncio.gather(*again)
    assert len({of(response) for response in unknown}) == 1
    stage[1].replies.clear()


async def test_equal_calls_at_once_are_samples_of_their_own(stage: Stage) -> None:
    stage[1].replies += ["a", "b", "c", "d"]
    responses = await asyncio.gather(*[send(stage, "ann", [user("four")]) for _ in range(4)])
    assert len({of(response) for response in responses}) == 4


async def test_a_retry_finds_its_episode_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    agents = {"ann": {"key": KEYS["ann"]}}
    async with scripted_gateway(tiny_model, tmp_path, agents=agents) as stage:
        first = await chat(stage, "ann", [user("early")], "kept")
        went_on = await chat(stage, "ann", [user("long")], "1")
        await chat(stage, "ann", [user("long"), assistant("1"), user("2")], "3")
        keyed = await chat(stage, "ann", [user("keyed")], "4", headers={"Idempotency-Key": "k"})
    async with scripted_gateway(tiny_model, tmp_path, agents=agents) as stage:
        again = await send(stage, "ann", [user("early")], headers=RETRY)
        assert (of(again), again.json()["choices"][0]["message"]["content"]) == (first, "kept")
        again = await send(stage, "ann", [user("keyed")], headers={"Idempotency-Key": "k"})
        assert (of(again), again.json()["choices"][0]["message"]["content"]) == (keyed, "4")
        assert await chat(stage, "ann", [user("long")], headers=RETRY) != went_on


def training(**agent: Any) -> dict[str, Any]:
    given = {"key": KEYS["ann"], "mode": "train", "group_size": 2, "max_wait_s": 0.0, **agent}
    return {"agents": {"ann": given}, "staleness": {"batch": 2, "eta": 0}}


async def groups_of(gateway: RunningGateway) -> Counter[str]:
    return Counter(row["group_id"] for row in await gateway.admin.episodes(agent="ann"))


async def test_groups_fill_up_in_order(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **training()) as stage:
        gateway, engine = stage
        engine.replies += ["r"] * 9
        ids = [
            of(response)
            for response in await asyncio.gather(*[send(stage, "ann", [user("t")]) for _ in range(3)])
        ]
        rows = [await gateway.admin.episode(episode) for episode in ids]
        assert {row["mode"] for row in rows} == {"train"}
        assert len({row["task_id"] for row in rows}) == 1
        assert sorted((await groups_of(gateway)).values()) == [1, 2]
        refused = await send(stage, "ann", [user("another task")])
        assert code(refused) == (429, "no_slot")
        assert int(refused.headers["retry-after"]) >= 1
        assert await chat(stage, "ann", [user("t"), assistant("r"), user("go on")], "s") not in ids, (
            "ambiguous"
        )
        assert sorted((await groups_of(gateway)).values()) == [2, 2]
        full = await send(stage, "ann", [user("t")])
        assert code(full) == (429, "no_slot")
        first = min(await groups_of(gateway))
        for row in await gateway.admin.episodes(group_id=first):
            await gateway.admin.reward(row["id"], 1.0)
        assert code(await send(stage, "ann", [user("t")])) == (429, "no_slot"), (
            "the batch has no room for a third group"
        )


async def test_a_group_goes_on_after_a_restart_and_a_closed_one_is_followed(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **training()) as stage:
        first = await chat(stage, "ann", [user("t")])
        await stage[0].admin.reward(first, 1.0)
    async with scripted_gateway(tiny_model, tmp_path, **training()) as stage:
        second = await chat(stage, "ann", [user("t")])
        rows = [await stage[0].admin.episode(episode) for episode in (first, second)]
        assert rows[0]["group_id"] == rows[1]["group_id"]
        await stage[0].admin.reward(second, 0.0)
        third = await stage[0].admin.episode(await chat(stage, "ann", [user("t")]))
        assert third["group_id"] == rows[0]["group_id"][:-1] + "2"
        lost = (await stage[0].admin.staleness())["lost"]
        assert not lost, "no call tries to join a full group"


async def test_calls_wait_for_a_slot_and_then_begin(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **training(max_wait_s=60, group_size=1)) as stage:
        gateway, engine = stage
        values = [await chat(stage, "ann", [user(str(i))]) for i in range(2)]
        engine.replies.append("late")
        waiting = asyncio.create_task(send(stage, "ann", [user("waits")]), name="waits")
        await until(lambda: sum(gateway.services.episodes.waiting("demo").values()) == 1, "it waits")
        await gateway.admin.abandon(values[0], "gives its slot up")
        assert of(await waiting) not in values


async def test_a_refused_call_frees_its_slot(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **training(group_size=1)) as stage:
        for _ in range(3):
            assert (await send(stage, "ann", [user("t")], max_tokens=10**9)).status_code == 400
        assert stage[0].services.episodes.open_count == 0


async def test_a_retry_waits_for_the_call_that_is_still_opening_its_episode(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **training(max_wait_s=60, group_size=1)) as stage:
        gateway, engine = stage
        taken = [await chat(stage, "ann", [user(str(i))]) for i in range(2)]
        first = asyncio.create_task(send(stage, "ann", [user("waits")]), name="first")
        await until(lambda: sum(gateway.services.episodes.waiting("demo").values()) == 1, "it waits")
        first.cancel()
        engine.replies += ["late", "later"]
        again = asyncio.create_task(send(stage, "ann", [user("waits")], headers=RETRY), name="again")
        await until(
            lambda: gateway.services.coordinator.callers.waiting == 1, "the retry waits for the first"
        )
        for episode in taken:
            await gateway.admin.abandon(episode, "gives its slot up")
        assert of(await again) not in taken
        assert len(await gateway.admin.episodes(agent="ann")) == 3
