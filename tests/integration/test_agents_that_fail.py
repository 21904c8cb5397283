"""Agents in their own processes that fail: what is trained, what is reported, what the driver waits for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from headgate.client import EpisodeRunner, RunStopped
from headgate.client.agents import CommandAgent, FunctionAgent, Task
from tests.harness.agents import one_call
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import result_of

ONE_OF_THREE_FAILS = """
import pathlib, sys, urllib.request, os, json
body = json.dumps({"model": "any", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
number = len(list(pathlib.Path(sys.argv[1]).iterdir()))
(pathlib.Path(sys.argv[1]) / str(number)).touch()
if number == 1:
    print(1.0)
    raise LookupError("no such tool")
print(number)
"""
TASK = Task("t", {"task_id": "t"})


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """One group is a batch, and one batch may run."""
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 1, "eta": 0}, rewards={"max": 10.0})
    async with run_gateway(values) as running:
        yield running


async def test_a_crashed_program_is_left_out_of_its_group_and_its_standard_error_is_kept(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    """Exit status 1 was a reward of 0, and trained as one."""
    seen = tmp_path / "seen"
    seen.mkdir()
    agent = CommandAgent([sys.executable, "-c", ONE_OF_THREE_FAILS, str(seen)], 600.0)
    runner = EpisodeRunner(gateway.admin, agent, group_size=3, concurrency=1, retries=0)
    good, crashed, best = await runner.run([TASK])
    assert (good.reward, crashed.reward, best.reward) == (0.0, None, 2.0)
    lease = await gateway.admin.lease("trainer")
    (group,) = (await gateway.admin.leased_groups(lease, wait_s=60)).groups
    assert sorted(episode.reward for episode in group.episodes) == [0.0, 2.0]
    row = await gateway.admin.episode(str(crashed.episode_id))
    assert (row["state"], row["reason"], row["reward"]) == ("closed", "agent_failed", None)
    assert "Traceback" in row["error"]
    assert row["error"].endswith("LookupError: no such tool")
    argv = ["episodes", "why", str(crashed.episode_id), "--gateway", gateway.url]
    shown = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, app, argv)
    assert "LookupError: no such tool" in shown.output
    assert shown.output.endswith("verdict: not trained, because its agent ended without a reward\n")


async def test_a_reward_that_the_gateway_refuses_holds_no_slot(gateway: RunningGateway) -> None:
    async def solve(task: dict[str, object], base_url: str, api_key: str) -> float:
        return 1e300

    runner = EpisodeRunner(gateway.admin, FunctionAgent(solve), group_size=2, concurrency=1)
    outcomes = await runner.run([TASK])
    assert all("[rewards] allows" in str(outcome.error) for outcome in outcomes)
    assert {row["reason"] for row in await gateway.admin.episodes()} == {"reward_refused"}
    assert (await gateway.admin.status())["free_slots"] == 1


async def test_an_unknown_model_ends_a_run_at_the_first_404(gateway: RunningGateway) -> None:
    async def never(task: dict[str, object], base_url: str, api_key: str) -> float:
        raise AssertionError("no episode was opened")

    runner = EpisodeRunner(gateway.admin, FunctionAgent(never), model="unknown", concurrency=1)
    with pytest.raises(RunStopped, match=r"the gateway will not open any episode: 404: .*'unknown'"):
        await runner.run_forever([TASK], asyncio.Event())


async def test_a_run_reports_that_no_slot_is_free(gateway: RunningGateway) -> None:
    episode, _ = await gateway.open("other", group_id="other", group_size=2)
    waits: list[str] = []
    reported = asyncio.Event()

    def wait(what: str) -> None:
        waits.append(what)
        reported.set()

    async def solve(task: dict[str, object], base_url: str, api_key: str) -> float:
        await one_call(base_url, api_key)
        return 1.0

    runner = EpisodeRunner(gateway.admin, FunctionAgent(solve), open_wait_s=0.5, on_wait=wait)
    running = asyncio.create_task(runner.run([TASK]), name="runner")
    await result_of(reported.wait(), "the driver reports what it waits for")
    (waited,) = waits
    assert waited.startswith(
        "no slot is free within the staleness bound: batch 0 has 1 unfinished group (1 open"
    )
    assert "no trainer has leased batch 0" in waited
    await gateway.admin.abandon(episode, "makes room")
    second, _ = await gateway.open("other", group_id="other", group_size=2)
    await gateway.admin.abandon(second, "makes room")
    (outcome,) = await result_of(running, "the driver has run its task")
    assert outcome.reward == 1.0
    assert waits[-1] == ""
