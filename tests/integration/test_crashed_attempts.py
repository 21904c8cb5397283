"""An agent that crashes and is started again in its episode: only what the last attempt did is trained and rewarded."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import httpx
import pytest

from gateway.trajectories.recorder import Recorder
from headgate.client import EpisodeRunner, Task
from headgate.client.admin import GatewayRefused
from headgate.client.agents import FunctionAgent
from headgate.keys import attempt_key
from headgate.types import CRASHED_ATTEMPT
from tests.harness.barrier import arrived, hold_after
from tests.harness.gateways import RunningGateway
from tests.harness.retries import lasting, send
from tests.harness.waiting import result_of


class Crashing:
    """Make two calls in each attempt, post rewards on them, and crash in the first attempt while another call runs."""

    def __init__(self, gateway: RunningGateway) -> None:
        self.gateway = gateway
        self.replies: list[list[str]] = []

    async def __call__(self, task: dict[str, Any], base_url: str, api_key: str) -> float:
        headers, replies = {"Authorization": f"Bearer {api_key}"}, []
        self.replies.append(replies)
        for step in ("one", "two"):
            message = {"role": "user", "content": step}
            body = {"model": "m", "messages": [message], "max_tokens": 8}
            response = await send(self.gateway, headers, body, **{"Idempotency-Key": f"step {step}"})
            assert response.status_code == 200
            replies.append(response.json()["id"])
            episode = response.headers["x-headgate-episode"]
            await self.gateway.admin.call_reward(episode, replies[-1], 0.25)
        if len(self.replies) == 1:
            await self.gateway.admin.reward(episode, -5.0, {"form": -5.0}, final=False)
            await self.crash(headers)
        return 1.0

    async def crash(self, headers: dict[str, str]) -> None:
        """Leave a call behind that still runs, out of the driver's reach."""
        await hold_after(self.gateway, 20)  # more than the other calls sample
        work = send(self.gateway, headers, lasting(self.gateway))
        self.left = asyncio.create_task(work, context=contextvars.Context())
        await arrived(self.gateway, 1)
        raise RuntimeError("out of memory")


async def test_what_a_crashed_attempt_did_is_neither_trained_nor_rewarded(gateway: RunningGateway) -> None:
    agent = Crashing(gateway)
    runner = EpisodeRunner(gateway.admin, FunctionAgent(agent))
    (outcome,) = await runner.run([Task("t", {"task_id": "t"})])
    crashed, whole = agent.replies
    assert (outcome.attempts, outcome.reward, outcome.error) == (2, 1.0, None)
    left: httpx.Response = await agent.left
    assert (left.status_code, left.json()["error"]["code"]) == (409, "attempt_over")
    assert not set(crashed) & set(whole), "an attempt is not answered from the record of the one before"
    lease = await gateway.admin.lease("trainer")
    groups = (await gateway.admin.leased_groups(lease, wait_s=60)).groups
    (episode,) = [episode for group in groups for episode in group.episodes]
    assert episode.reward == 1.0 + 0.5
    reasons = {node.call_id: node.mask_reason for node in episode.nodes if node.sampled}
    assert {call_id: reasons[call_id] for call_id in crashed} == dict.fromkeys(crashed, CRASHED_ATTEMPT)
    assert {call_id for call_id, reason in reasons.items() if not reason} == set(whole)
    rewards = {node.call_id: node.reward for node in episode.nodes if node.reward is not None}
    assert rewards == dict.fromkeys(whole, 0.25)
    row = await gateway.admin.episode(episode.episode_id)
    assert row["components"] == {"calls": 0.5}
    assert row["refused_calls"] == [], "a running call that the restart stopped was not refused"


async def test_an_episode_that_is_over_is_not_started_again(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task")
    await gateway.chat(headers, max_tokens=4)
    await gateway.admin.reward(episode, 1.0)
    with pytest.raises(GatewayRefused) as error:
        await gateway.admin.restart(episode)
    assert (error.value.status, error.value.code) == (409, "episode_closed")
    nodes = (await gateway.admin.trajectory(episode))["nodes"]
    assert {node["mask_reason"] for node in nodes} == {""}


async def test_the_key_of_a_crashed_attempt_is_refused_and_the_next_one_has_its_own(
    gateway: RunningGateway,
) -> None:
    """As with a driver of a person's own whose first process is not quite dead."""
    episode, headers = await gateway.open("task")
    assert (await gateway.chat(headers, max_tokens=4)).status_code == 200
    for attempt in (2, 3):
        assert await gateway.admin.restart(episode) == attempt
    key = headers["Authorization"]
    early = (await gateway.chat({"Authorization": attempt_key(key, 4)}, max_tokens=4)).json()["error"]
    assert early["code"] == "attempt_not_begun" and "attempt 4" in early["message"]
    assert "has not begun: attempt 3 uses the episode's key followed by .3" in early["message"]
    for old in (key, attempt_key(key, 2)):
        refused = await gateway.chat({"Authorization": old}, max_tokens=4)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (409, "attempt_over")
        assert "followed by .3" in error["message"]
    assert (await gateway.chat({"Authorization": attempt_key(key, 3)}, max_tokens=4)).status_code == 200
    sampled = [node for node in (await gateway.admin.trajectory(episode))["nodes"] if node["sampled"]]
    assert [node["mask_reason"] for node in sampled] == [CRASHED_ATTEMPT, ""]
    row = await gateway.admin.episode(episode)
    assert row["attempt"] == 3
    refused_calls = [(call["api"], call["status"], call["code"]) for call in row["refused_calls"]]
    assert refused_calls == [("chat", 409, code) for code in ("attempt_not_begun", *["attempt_over"] * 2)]


async def test_a_request_that_the_restart_overtakes_is_refused(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key was checked before the restart, and its call begins after it."""
    episode, headers = await gateway.open("task")
    checked, go_on = asyncio.Event(), asyncio.Event()
    prepare = Recorder.prepare

    async def held(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        prompt = await prepare(self, *args, **kwargs)
        checked.set()
        await go_on.wait()
        return prompt

    monkeypatch.setattr(Recorder, "prepare", held)
    late = asyncio.create_task(gateway.chat(headers, max_tokens=4), name="late")
    await result_of(checked.wait(), "the request is under way")
    await gateway.admin.restart(episode)
    go_on.set()
    refused = await late
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "attempt_over")
    assert not (await gateway.admin.episode(episode))["calls"]


async def test_an_agent_ends_when_its_episode_is_closed(gateway: RunningGateway) -> None:
    """The driver hears of it from the gateway's events."""
    running = asyncio.Event()

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        running.set()
        await asyncio.Event().wait()
        return 1.0

    runner = EpisodeRunner(gateway.admin, FunctionAgent(solve), retries=0)
    outcomes = asyncio.create_task(runner.run([Task("t", {"task_id": "t"})]), name="runner")
    await result_of(running.wait(), "the agent runs")
    (row,) = await gateway.admin.episodes(state="open")
    await gateway.admin.abandon(row["id"], "operator")
    (outcome,) = await result_of(outcomes, "the agent has been let go")
    assert outcome.error == "closed by the gateway: operator"
