"""The runner against an admin API behind a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from headgate.client import EpisodeOutcome, EpisodeRunner, GatewayRefused, GatewayUnreachable, opening, retry
from headgate.client.admin import GatewayClient
from headgate.client.agents import FunctionAgent, Task
from headgate.client.order import Passes
from headgate.keys import split_attempt
from headgate.processes.child import LocalProcess
from headgate.types import EpisodeOpened
from tests.harness.waiting import LONG_S, result_of, turns, until, within
from tests.unit.headgate.client.conftest import FakeGateway

TASKS = [Task(f"t{i}", {"task_id": f"t{i}", "value": i}) for i in range(6)]


async def value(task: dict[str, Any], base_url: str, api_key: str) -> float:
    await turns(1)
    return float(task["value"])


async def hang(task: dict[str, Any], base_url: str, api_key: str) -> float:
    await asyncio.Event().wait()
    return 0.0


def failing(times: int) -> Callable[[dict[str, Any], str, str], Any]:
    """Return an agent that crashes `times` times in every episode, then earns 1.0."""
    calls: Counter[str] = Counter()

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        episode, attempt = split_attempt(api_key)
        calls[episode] += 1
        assert calls[episode] == attempt, "each attempt has its own key"
        if attempt <= times:
            raise RuntimeError(f"crash {attempt}")
        return 1.0

    return solve


async def test_every_task_gets_its_group_and_every_episode_its_reward(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    seen: list[EpisodeOutcome] = []
    agent = FunctionAgent(value)
    runner = EpisodeRunner(client, agent, group_size=3, concurrency=4, on_outcome=seen.append)
    outcomes = await runner.run(iter(TASKS))
    assert [(o.task_id, o.reward, o.error) for o in outcomes] == [
        (t.task_id, float(t.data["value"]), None) for t in TASKS for _ in range(3)
    ]
    assert set(Counter(o.group_id for o in outcomes).values()) == {3}
    assert sorted(o.episode_id or "" for o in seen) == sorted(gateway.rewards)
    assert all(o["group_size"] == 3 and o["mode"] == "train" for o in gateway.opened)
    first = {o["group_id"] for o in gateway.opened[:3]}
    assert len(first) == 1, "the members of a group start one after the other"
    by_id = {o.episode_id: o.reward for o in outcomes}
    assert {e: r["reward"] for e, r in gateway.rewards.items()} == by_id
    assert all(r["final"] for r in gateway.rewards.values())


async def test_two_runs_of_a_task_are_two_groups(gateway: FakeGateway, client: GatewayClient) -> None:
    for _ in range(2):
        await EpisodeRunner(client, FunctionAgent(value), mode="eval").run([TASKS[0], TASKS[0]])
    assert len({o["group_id"] for o in gateway.opened}) == 4
    assert {o["mode"] for o in gateway.opened} == {"eval"}


async def test_episodes_are_of_the_model_that_is_named(gateway: FakeGateway, client: GatewayClient) -> None:
    for model in (None, "planner"):
        await EpisodeRunner(client, FunctionAgent(value), model=model).run(TASKS[:1])
    assert [opened["model"] for opened in gateway.opened] == [None, "planner"]


async def test_the_command_line_names_the_model(gateway: FakeGateway, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t", "value": 3}\n')
    options = [
        "--tasks",
        tasks,
        "--model",
        "planner",
        "--gateway",
        gateway.url,
        "--agent",
        f"{__name__}:value",
        "--group-size",
        "1",
    ]
    argv = ["episodes", "run", *map(str, options)]
    done = await asyncio.to_thread(CliRunner().invoke, app, argv)
    assert done.exit_code == 0, done.output
    assert [opened["model"] for opened in gateway.opened] == ["planner"]
    assert [posted["reward"] for posted in gateway.rewards.values()] == [3.0]


async def test_components_are_posted(gateway: FakeGateway, client: GatewayClient) -> None:
    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        return {"reward": 1, "components": {"form": 0.5}}

    (outcome,) = await EpisodeRunner(client, FunctionAgent(solve)).run(TASKS[:1])
    assert outcome.components == gateway.rewards["e1"]["components"] == {"form": 0.5}


async def test_concurrency_limits_the_episodes_in_flight(gateway: FakeGateway, client: GatewayClient) -> None:
    running: set[str] = set()
    most, three = 0, asyncio.Barrier(3)

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        nonlocal most
        running.add(api_key)
        most = max(most, len(running))
        await three.wait()
        running.remove(api_key)
        return 0.0

    await EpisodeRunner(client, FunctionAgent(solve), group_size=2, concurrency=3).run(TASKS)
    assert most == 3


async def test_a_crash_is_tried_again_in_the_same_episode(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    (outcome,) = await EpisodeRunner(client, FunctionAgent(failing(1))).run(TASKS[:1])
    assert (outcome.reward, outcome.error, outcome.attempts) == (1.0, None, 2)
    assert gateway.requests["open"] == 1
    assert gateway.restarted == ["e1"]
    assert not gateway.abandoned


async def test_a_crash_is_not_tried_again_in_an_episode_that_is_over(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    gateway.restart_status = 409
    (outcome,) = await EpisodeRunner(client, FunctionAgent(failing(1))).run(TASKS[:1])
    assert (outcome.reward, outcome.error, outcome.attempts) == (None, "RuntimeError: crash 1", 1)


async def test_an_agent_that_keeps_crashing_is_abandoned_and_the_others_go_on(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        if task["value"] == 0:
            raise RuntimeError("crash")
        return float("nan") if task["value"] == 1 else 1.0

    crash, nan, good = await EpisodeRunner(client, FunctionAgent(solve), concurrency=1).run(TASKS[:3])
    assert (crash.reward, crash.error, crash.attempts) == (None, "RuntimeError: crash", 2)
    assert nan.error == "AgentCrashed: a reward is a finite number, not nan"
    assert (good.reward, good.error) == (1.0, None)
    assert crash.crashes == ("RuntimeError: crash",) * 2
    assert gateway.abandoned == {"e1": "agent_failed", "e2": "agent_failed"}
    assert gateway.errors["e1"].startswith("RuntimeError: crash\nTraceback")
    assert "test_driver.py" in gateway.errors["e1"]
    assert gateway.errors["e2"] == nan.error
    assert set(gateway.rewards) == {"e3"}


async def test_another_refusal_is_the_outcome(gateway: FakeGateway, client: GatewayClient) -> None:
    gateway.refusals.append((409, 0.0))
    outcomes = await EpisodeRunner(client, FunctionAgent(value), concurrency=1).run(TASKS[:2])
    assert [(o.episode_id, o.error) for o in outcomes] == [(None, "open: 409: refused"), ("e1", None)]


async def test_a_refused_reward_is_the_outcome(gateway: FakeGateway, client: GatewayClient) -> None:
    gateway.reward_status = 409
    (outcome,) = await EpisodeRunner(client, FunctionAgent(value)).run(TASKS[:1])
    assert (outcome.reward, outcome.error) == (None, "reward: 409: refused")
    assert gateway.abandoned == {"e1": "reward_refused"}, "its slot would be held until the deadline"


async def test_a_run_ends_immediately_where_no_gateway_responds() -> None:
    async with GatewayClient("http://127.0.0.1:9") as client:
        with pytest.raises(
            GatewayUnreachable, match=r"no gateway responds at http://127\.0\.0\.1:9 .*: start one"
        ):
            await result_of(EpisodeRunner(client, FunctionAgent(value)).run(TASKS), "the run has ended", 20.0)


async def test_a_gateway_that_dies_while_all_agents_run_is_reported_and_ends_the_run(
    gateway: FakeGateway, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "SILENT_S", 0.05)
    monkeypatch.setattr(retry, "_FIRST_BACKOFF_S", 0.01)
    waits: list[str] = []

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        gateway.die()
        return await hang(task, base_url, api_key)

    runner = EpisodeRunner(client, FunctionAgent(solve), unreachable_s=0.3, on_wait=waits.append)
    with pytest.raises(
        GatewayUnreachable, match=rf"the gateway at {gateway.url} has not responded for 0\.3 s"
    ):
        await result_of(runner.run(TASKS[:1]), "the run has ended")
    assert waits[0].startswith(f"the gateway at {gateway.url}, which has not responded for 0 s")


async def test_runs_until_it_is_stopped_and_finishes_its_groups(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    stop = asyncio.Event()

    def count(outcome: EpisodeOutcome) -> None:
        if len(gateway.rewards) >= 40:
            stop.set()

    agent = FunctionAgent(value)
    runner = EpisodeRunner(client, agent, group_size=4, concurrency=6, seed=1, on_outcome=count)
    async with within("the driver has stopped"):
        await runner.run_forever(TASKS, stop)
    assert len(gateway.rewards) == len(gateway.opened) >= 40
    assert set(Counter(o["group_id"] for o in gateway.opened).values()) == {4}
    order = list(dict.fromkeys((o["group_id"], o["task_id"]) for o in gateway.opened))
    first, second = ([task_id for _, task_id in order[i : i + 6]] for i in (0, 6))
    everything = {t.task_id for t in TASKS}
    assert set(first) == everything
    assert set(second) <= everything
    assert first != second[: len(first)]


async def test_an_order_hears_of_whole_groups_whether_their_rewards_differ(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    """Of t0 all members earn the same, of t1 not, and of t2 one alone earns anything: nothing is known of it."""
    stop, heard = asyncio.Event(), []

    class Recording(Passes):
        def ended(self, task_id: str, teaches: bool | None) -> None:
            heard.append((task_id, teaches))
            if len(heard) >= 6:
                stop.set()

    started: Counter[str] = Counter()

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        name = task["task_id"]
        started[name] += 1
        if name == "t2" and started[name] % 3:
            raise RuntimeError("no such tool")
        return float(started[name] if name == "t1" else 1)

    order, tasks = Recording(TASKS[:3], 1), TASKS[:3]
    runner = EpisodeRunner(
        client, FunctionAgent(solve), group_size=3, concurrency=1, retries=0, max_failures=1.0, order=order
    )
    async with within("the driver has stopped"):
        await runner.run_forever(tasks, stop)
    assert {*heard} == {("t0", False), ("t1", True), ("t2", None)}


async def test_stops_although_no_slot_comes(gateway: FakeGateway, client: GatewayClient) -> None:
    gateway.always = (429, 0.05)
    stop = asyncio.Event()
    runner = EpisodeRunner(client, FunctionAgent(value))
    running = asyncio.create_task(runner.run_forever(TASKS, stop), name="runner")
    await until(lambda: gateway.requests["open"] > 10, "it asks again and again")
    assert not running.done()
    stop.set()
    async with within("the driver has stopped"):
        await running


@pytest.mark.parametrize("refused", ["before the stop", "after the stop"])
async def test_a_stop_wakes_a_member_that_was_sent_away(
    gateway: FakeGateway, client: GatewayClient, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Another member has begun its group in the meantime, and a group that is half begun would hold its slot for long."""
    monkeypatch.setattr(opening, "STOP_GRACE_S", LONG_S)
    gateway.refusals.append((429, 3600.0))
    stop, sent_away = asyncio.Event(), asyncio.Event()
    open_episode = client.open_episode

    async def open_and_report(*args: Any, **options: Any) -> EpisodeOpened:
        try:
            return await open_episode(*args, **options)
        except GatewayRefused:
            sent_away.set()
            if refused == "after the stop":
                await stop.wait()
            raise

    monkeypatch.setattr(client, "open_episode", open_and_report)
    runner = EpisodeRunner(client, FunctionAgent(value), group_size=2, concurrency=2)
    running = asyncio.create_task(runner.run_forever(TASKS[:1], stop), name="runner")
    await until(lambda: len(gateway.opened) >= 1, "an episode was opened")
    await result_of(sent_away.wait(), "another was sent away")
    stop.set()
    async with within("the driver has stopped"):
        await running
    begun = Counter(opened["group_id"] for opened in gateway.opened)
    assert begun[gateway.opened[0]["group_id"]] == 2


async def test_cancelling_the_runner_cancels_its_agents_and_gives_their_places_back(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    started: list[str] = []
    cancelled: list[str] = []

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        started.append(api_key)
        try:
            return await hang(task, base_url, api_key)
        except asyncio.CancelledError:
            cancelled.append(api_key)
            raise

    runner = EpisodeRunner(client, FunctionAgent(solve), concurrency=3)
    running = asyncio.create_task(runner.run(TASKS), name="runner")
    await until(lambda: len(started) == 3, "three run")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(cancelled) == ["key-e1", "key-e2", "key-e3"]
    assert gateway.abandoned == dict.fromkeys(("e1", "e2", "e3"), "interrupted")


async def test_what_on_outcome_raises_ends_the_run(gateway: FakeGateway, client: GatewayClient) -> None:
    def refuse(outcome: EpisodeOutcome) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        await EpisodeRunner(client, FunctionAgent(value), on_outcome=refuse).run(TASKS)


@pytest.mark.parametrize(("options", "status"), [((), 130), (("--forever",), 0)], ids=["once", "forever"])
async def test_ctrl_c_gives_open_episodes_up_and_prints_the_summary(
    gateway: FakeGateway, tmp_path: Path, options: tuple[str, ...], status: int
) -> None:
    tasks, log = tmp_path / "tasks.jsonl", tmp_path / "driver.log"
    tasks.write_text('{"task_id": "t0"}\n{"task_id": "t1"}\n')
    argv = [sys.executable, "-m", "gateway.cli", "episodes", "run", "--tasks", str(tasks), *options]
    argv += [
        "--gateway",
        gateway.url,
        "--group-size",
        "1",
        "--concurrency",
        "2",
        "--agent",
        f"{__name__}:hang",
    ]
    process = await LocalProcess.start("driver", argv, log)
    try:
        await until(lambda: len(gateway.opened) == 2, "two episodes are open")
        os.kill(process.pid, signal.SIGINT)
        assert await result_of(process.wait(), "the driver has ended") == status, log.read_text()
    finally:
        await process.stop(0.0)
    assert gateway.abandoned == {"e1": "interrupted", "e2": "interrupted"}
    printed = log.read_text()
    assert "press ctrl-c again to end immediately" in printed
    assert json.loads(printed.splitlines()[-1])["interrupted"] is True
