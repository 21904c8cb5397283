"""Attempts of agents: what one of them raises, cancels, starts or waits for ends that attempt and nothing else."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from gateway.cli.progress import CANCELLED, EpisodeProgress
from headgate.client import EpisodeOutcome, EpisodeRunner, GatewayClient, RunStopped, driver, foreign
from headgate.client.agents import AgentCrashed, FunctionAgent, Task
from headgate.client.foreign import Exited, RanIntoCancel
from tests.harness.waiting import result_of, turns, within
from tests.unit.headgate.client.conftest import FakeGateway

TASKS = [Task(f"t{i}", {"task_id": f"t{i}"}) for i in range(5)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the next attempt immediately after a crash."""
    monkeypatch.setattr(driver, "pause_s", lambda failures, jitter: 0.0)


async def forever(task: dict[str, Any], base_url: str, api_key: str) -> float:
    await asyncio.Event().wait()
    return 0.0


async def awaits_a_cancelled_tool() -> None:
    """Ordinary code: a tool's task is cancelled when its time is over, and awaited without a thought."""
    tool = asyncio.create_task(asyncio.Event().wait())
    await turns(1)
    tool.cancel()
    await tool


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await turns(1)


async def groups_a_cancellation() -> None:
    raise BaseExceptionGroup("unhandled", [asyncio.CancelledError()])


@pytest.mark.parametrize("break_off", [awaits_a_cancelled_tool, cancels_itself, groups_a_cancellation])
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_leaked_cancellation_is_a_failure_of_its_attempt(
    gateway: FakeGateway, client: GatewayClient, break_off: Callable[[], Any], concurrency: int
) -> None:
    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        if task["task_id"] == "t1":
            await break_off()
        return 1.0

    outcomes = await EpisodeRunner(client, FunctionAgent(solve), concurrency=concurrency).run(TASKS)
    assert [outcome.reward for outcome in outcomes] == [1.0, None, 1.0, 1.0, 1.0]
    failed = outcomes[1]
    assert failed.attempts == 2
    assert gateway.abandoned == {failed.episode_id: "agent_failed"}
    assert "test_attempts.py" in gateway.errors[failed.episode_id or ""], "its traceback is kept"


async def test_a_hook_that_leaks_a_cancellation_ends_the_run_with_an_error(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    def leak(outcome: EpisodeOutcome) -> None:
        raise asyncio.CancelledError

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        return 1.0

    with pytest.raises(RanIntoCancel):
        await EpisodeRunner(client, FunctionAgent(solve), on_outcome=leak).run(TASKS)


async def test_a_failed_attempt_leaves_none_of_its_tasks_behind(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    """`gather` does not cancel the others when one fails, and their tasks start tasks."""
    ended: list[str] = []

    async def sub_agent(name: str) -> None:
        try:
            if name == "first":
                await asyncio.create_task(sub_agent("second"))
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def broken_tool() -> None:
        await turns()
        raise ValueError("tool broke")

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        if api_key == "key-e1":
            await asyncio.gather(broken_tool(), sub_agent("first"))
        assert sorted(ended) == ["first", "second"]
        assert api_key == "key-e1.2"
        return 1.0

    (outcome,) = await EpisodeRunner(client, FunctionAgent(solve)).run(TASKS[:1])
    assert (outcome.reward, outcome.crashes) == (1.0, ("ValueError: tool broke",))


async def test_a_function_has_a_time_limit() -> None:
    agent = FunctionAgent(forever, timeout_s=0.05)
    with pytest.raises(AgentCrashed, match=r"not done within 0\.05 s") as error:
        await result_of(agent(TASKS[0], "", ""), "the limit has passed", 60.0)
    assert error.value.reason == "time_limit"


async def test_a_function_that_blocked_the_event_loop_past_its_time_limit_has_overrun() -> None:
    async def blocks(task: dict[str, Any], base_url: str, api_key: str) -> float:
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass
        return 1.0

    with pytest.raises(AgentCrashed, match=r"not done within 0\.05 s"):
        await FunctionAgent(blocks, timeout_s=0.05)(TASKS[0], "", "")


async def test_a_keyboard_interrupt_of_a_functions_own_is_its_failure() -> None:
    async def raises(task: dict[str, Any], base_url: str, api_key: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(Exited, match="it raised KeyboardInterrupt"):
        await FunctionAgent(raises)(TASKS[0], "", "")


async def test_an_agent_that_cancels_the_drivers_tasks_ends_the_run_in_one_sentence(
    client: GatewayClient,
) -> None:
    async def cancels(task: dict[str, Any], base_url: str, api_key: str) -> float:
        driver_task.cancel()
        await asyncio.Event().wait()
        return 1.0

    output = io.StringIO()
    progress = EpisodeProgress(1, Console(file=output))

    async def drive() -> None:
        with progress.interrupts():
            await EpisodeRunner(client, FunctionAgent(cancels), on_outcome=progress.add).run(TASKS[:1])

    driver_task = asyncio.create_task(drive())
    await result_of(driver_task, "the run has ended", 60.0)
    assert output.getvalue().strip() == CANCELLED
    assert progress.summary()["cancelled"] is True


async def test_a_timeout_of_the_agents_own_is_an_error_as_any_other() -> None:
    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        raise TimeoutError("the search engine")

    with pytest.raises(TimeoutError, match="the search engine"):
        await FunctionAgent(solve)(TASKS[0], "", "")


@pytest.mark.parametrize(
    ("reason", "error", "aborted"),
    [("idle_deadline", "closed by the gateway: idle_deadline", None), ("surplus", None, "surplus")],
)
async def test_an_agent_whose_episode_the_gateway_closes_is_let_go(
    gateway: FakeGateway, client: GatewayClient, reason: str, error: str | None, aborted: str | None
) -> None:
    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        if task["task_id"] == "t0":
            gateway.close(api_key.removeprefix("key-"), reason)
            await asyncio.Event().wait()
        return 1.0

    async with within("the lane goes on", 60.0):
        runner = EpisodeRunner(client, FunctionAgent(solve), concurrency=1)
        first, second = await runner.run(TASKS[:2])
    assert (first.reward, first.error, first.aborted) == (None, error, aborted)
    assert second.reward == 1.0


async def test_a_lane_goes_on_without_an_agent_that_refuses_to_be_cancelled(
    gateway: FakeGateway,
    client: GatewayClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(foreign, "_GRACE_S", 0.05)
    let_go = asyncio.Event()

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        if task["task_id"] == "t0":
            gateway.close(api_key.removeprefix("key-"), "idle_deadline")
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    continue
        return 1.0

    async with within("the lane goes on", 60.0):
        runner = EpisodeRunner(client, FunctionAgent(solve), concurrency=1)
        outcomes = await runner.run(TASKS[:2])
    assert [outcome.reward for outcome in outcomes] == [None, 1.0]
    assert "is still running" in caplog.text
    let_go.set()
    await turns()


async def test_a_refusal_that_lasts_until_the_gateway_is_restarted_ends_the_run(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    gateway.always, gateway.code = (503, 0.0), "ledger_broken"
    with pytest.raises(RunStopped, match="will not open any episode: 503"):
        await result_of(EpisodeRunner(client, FunctionAgent(forever)).run(TASKS), "it has ended", 60.0)
    assert gateway.requests["open"] <= len(TASKS)


async def test_agents_that_take_long_are_reported(gateway: FakeGateway, client: GatewayClient) -> None:
    reported: list[str] = []
    heard = asyncio.Event()

    def hear(reason: str) -> None:
        reported.append(reason)
        heard.set()

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        await heard.wait()
        return 1.0

    async with within("the agent was reported", 60.0):
        await EpisodeRunner(client, FunctionAgent(solve), on_wait=hear).run(TASKS[:1])
    assert reported == ["agents to finish", ""]
