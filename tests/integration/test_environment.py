"""An environment's process as the driver sees it: what it responds, how it fails, and what is left of it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from headgate.client import EpisodeRunner
from headgate.client.agents import AgentCrashed, Task
from headgate.client.environment import EnvironmentAgent
from headgate.environments.base import Played
from headgate.environments.worker import _Worker
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import turns

TASK = Task("t", {"question": "hi"})


async def test_its_calls_earn_its_rewards_and_its_failures_have_reasons(gateway: RunningGateway) -> None:
    agent = EnvironmentAgent("fake:a", {"fails": 3})
    try:
        tasks = await agent.tasks("train", 3)
        outcomes = await EpisodeRunner(gateway.admin, agent, concurrency=1, retries=0).run(tasks)
    finally:
        await agent.close()
    *earned, failed = [await gateway.admin.episode(str(outcome.episode_id)) for outcome in outcomes]
    for row in earned:
        (call,) = row["calls"]
        assert row["reward"] == call["reward"]
        assert row["components"].keys() == {"characters", "calls"}
    assert (failed["reason"], failed["reward"]) == ("tool_failed", None)
    assert "the fake tool server is down" in failed["error"]


async def test_its_splits_share_no_task_and_are_the_same_in_every_process() -> None:
    found = []
    for _ in range(2):
        agent = EnvironmentAgent("fake:a", {"size": 100})
        try:
            found.append([await agent.tasks(split) for split in ("train", "eval", "all")])
        finally:
            await agent.close()
    assert found[0] == found[1]
    train, held, every = ({task.task_id for task in tasks} for tasks in found[0])
    assert train | held == every
    assert not train & held
    assert len(every) == 100
    assert held


async def test_a_process_that_dies_fails_who_plays_in_it_and_the_next_starts_another(
    gateway: RunningGateway,
) -> None:
    agent = EnvironmentAgent("fake:a")
    try:
        assert gateway.engine is not None
        opened = await gateway.admin.open_episode("t")
        await agent(TASK, opened.base_url, opened.api_key)
        (process,) = agent_processes()
        gateway.engine.hold_after(1)
        playing = asyncio.create_task(agent(TASK, opened.base_url, opened.api_key), name="playing")
        await gateway.engine.arrived(1)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(AgentCrashed, match="ended with -9") as crashed:
            await playing
        assert crashed.value.reason == "environment_failed"
        gateway.engine.release()
        assert (await agent(TASK, opened.base_url, opened.api_key)) is not None
    finally:
        await agent.close()
    assert not agent_processes()


def agent_processes() -> list[int]:
    """The processes that an environment lives in, by what they were started with."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended during the scan
            argv = path.read_bytes().split(b"\0")
            if b"fake:a" in argv and os.getpid() == parent_of(path.parent):
                found.append(int(path.parent.name))
    return found


def parent_of(folder: Path) -> int:
    return int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("fake:a", {"nothing": 1}, "unexpected keyword argument 'nothing'"),
        ("inspect:nowhere", {}, r"needs inspect_ai, which .+: pip install .*\[inspect\]'.*--env-python"),
        ("fake:a", {"size": 0}, "has no task of the split 'train'"),
    ],
)
async def test_a_failed_load_of_an_environment_has_the_reason(
    name: str, args: dict[str, int], reason: str
) -> None:
    agent = EnvironmentAgent(name, args)
    try:
        with pytest.raises(ValueError, match=reason):
            await agent.tasks("train")
    finally:
        await agent.close()


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="one of verifiers, inspect, gym, reasoning-gym, fake as its kind"):
        EnvironmentAgent("gymnasium:CartPole-v1")


class Cancels:
    """An environment in which a cancellation leaks out of every episode, or that plays for ever."""

    async def play(self, data: dict[str, Any], base_url: str, api_key: str) -> Played:
        if data["leaks"]:
            raise asyncio.CancelledError
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(("leaks", "reasons"), [(True, ["environment_failed"]), (False, [])])
async def test_an_unrequested_cancellation_is_a_failure_with_a_response(
    leaks: bool, reasons: list[str]
) -> None:
    """Without a response the driver would wait for the episode's time limit."""
    responses = io.BytesIO()
    worker = _Worker("cancels", cast(Any, Cancels()), responses)
    worker._accept({"id": 1, "play": {"leaks": leaks}, "base_url": "", "api_key": ""})
    (playing,) = worker._playing.values()
    await turns(1)
    if not leaks:
        worker._accept({"id": 1, "cancel": True})
    await asyncio.wait({playing})
    assert [json.loads(line)["reason"] for line in responses.getvalue().splitlines()] == reasons
