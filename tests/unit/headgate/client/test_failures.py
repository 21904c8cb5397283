"""Agents that fail: how often they are tried, what is reported of them, and when a run is given up."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console

from gateway.cli.progress import EpisodeProgress
from headgate.client import EpisodeOutcome, EpisodeRunner, GatewayClient, RunStopped, driver, opening
from headgate.client.agents import CommandAgent, FunctionAgent, Task
from headgate.client.failures import LEAST, Crashes, FailureRate, in_a_line, pause_s
from tests.harness.gateway_command import gateway_command
from tests.harness.waiting import LONG_S, turns, within
from tests.unit.headgate.client.conftest import FakeGateway

TASKS = [Task(f"t{i}", {"task_id": f"t{i}"}) for i in range(3)]
BOOM = [
    "sh",
    "-c",
    r"echo 1; printf 'working\nTraceback (most recent call last):\nValueError: boom\n' >&2; exit 1",
]
"""A command that fails with the output of a Python program; a shell starts in a fraction of the time."""


async def crash(task: dict[str, Any], base_url: str, api_key: str) -> float:
    raise RuntimeError(f"crash of {api_key}")


async def earn(task: dict[str, Any], base_url: str, api_key: str) -> float:
    return 1.0


def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Skip the pauses between episodes; return the length of each."""
    pauses: list[float] = []

    async def sleep_or_stop(seconds: float, stop: asyncio.Event | None) -> None:
        pauses.append(seconds)
        await turns(1)

    monkeypatch.setattr(driver, "sleep_or_stop", sleep_or_stop)
    return pauses


# Policies


def test_a_pause_is_twice_as_long_after_each_failure_and_never_the_same() -> None:
    jitter = random.Random(1)
    for failures, longest in enumerate([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0], 1):
        pauses = [pause_s(failures, jitter) for _ in range(50)]
        assert len(set(pauses)) > 40
        assert longest / 2 <= min(pauses) <= max(pauses) <= longest
    assert pause_s(10**6, jitter) <= 30.0


def test_a_run_is_stopped_by_a_share_of_its_last_episodes_and_not_by_its_first_few() -> None:
    share = FailureRate(0.5, 8)
    for _ in range(LEAST - 1):
        share.add("boom")
    with pytest.raises(
        RunStopped, match=r"20 of the last 20 episodes failed; .*max_failed_share.* \(0\.5\); .*: boom"
    ):
        share.add("boom")
    half = FailureRate(0.5, 8)
    for _ in range(200):
        half.add(None)
        half.add("boom")
    many = FailureRate(0.5, 64)
    for _ in range(64):
        many.add("an engine was away")
    for _ in range(64):
        many.add(None)
    late = FailureRate(0.5, 8)
    for _ in range(1000):
        late.add(None)
    for _ in range(50):
        late.add("boom")
    with pytest.raises(RunStopped, match="51 of the last 100"):
        late.add("boom")
    never = FailureRate(1.0, 8)
    for _ in range(500):
        never.add("boom")
    with pytest.raises(ValueError, match="share"):
        FailureRate(1.5, 8)


def test_crashes_of_one_kind_are_one_whatever_numbers_are_in_them() -> None:
    crashes = Crashes()
    assert crashes.is_new("ConnectionError at 0x7f12ab, port 4711, ep-00ff00ff00ff00ff00ff")
    for port in range(500):
        assert not crashes.is_new(f"ConnectionError at 0x{port:x}, port {port}, ep-{port:020x}")
    assert crashes.is_new("ValueError: boom\nand more")
    assert [attempts for *_, attempts in crashes.counts()] == [501, 1]
    assert crashes.counts()[1][0] == "ValueError: boom: and more"
    some = Crashes()
    printed = sum(some.is_new(f"KeyError: {'x' * i}") for i in range(1, 1000))
    assert printed == 20
    assert some.counts()[0][::2] == ("others", 979)


def test_an_error_of_many_lines_is_its_first_and_its_last() -> None:
    assert in_a_line("python ended with 1; stderr:\nTraceback:\n  x\nValueError: boom\n") == (
        "python ended with 1: ValueError: boom"
    )
    assert in_a_line("") == ""


# The driver


async def test_an_agent_that_always_fails_ends_a_run_without_end_after_a_few_tries(
    gateway: FakeGateway, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real child processes; before, they were started again and again for as long as the run was let."""
    quick(monkeypatch)
    monkeypatch.setattr(opening, "STOP_GRACE_S", LONG_S)
    seen: list[EpisodeOutcome] = []
    agent = CommandAgent(BOOM, LONG_S)
    runner = EpisodeRunner(client, agent, concurrency=4, retries=0, on_outcome=seen.append)
    with pytest.raises(
        RunStopped, match=r"20 of the last 20 episodes failed.*ended with 1: ValueError: boom"
    ):
        async with within("the driver gives up"):
            await runner.run_forever(TASKS, asyncio.Event())
    assert LEAST <= len(seen) < LEAST + 4, "each of the four lanes may have one more under way"
    assert all(outcome.reward is None for outcome in seen)
    assert not gateway.rewards
    assert len(gateway.opened) < LEAST + 4
    assert set(gateway.abandoned) == {f"e{i + 1}" for i in range(len(gateway.opened))}, "no slot is held"
    assert set(gateway.abandoned.values()) <= {"agent_failed", "driver_stopped"}
    assert "working\nTraceback" in gateway.errors["e1"]


async def test_failures_in_a_row_are_followed_by_longer_and_longer_pauses(
    gateway: FakeGateway, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by tries: 30 of them need more than seven minutes of pauses. A success starts over."""
    pauses, tries = quick(monkeypatch), 0

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        nonlocal tries
        tries += 1
        if tries == 25:
            return 1.0
        raise RuntimeError("crash")

    runner = EpisodeRunner(
        client, FunctionAgent(solve), concurrency=1, retries=0, group_size=10, max_failures=1.0
    )
    await runner.run(TASKS)
    assert (tries, len(pauses)) == (30, 29)
    # Below the longest pause, two failures later the least pause is twice the longest one before.
    assert all(later >= 2 * before for before, later in zip(pauses[:6:2], pauses[2:8:2], strict=True))
    assert sum(pauses[:24]) > 240
    assert pauses[24] <= 0.2


async def test_a_crashed_agent_is_started_again_after_a_pause(
    gateway: FakeGateway, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures_seen: list[int] = []
    monkeypatch.setattr(driver, "pause_s", lambda failures, _jitter: failures_seen.append(failures) or 0.0)
    await EpisodeRunner(client, FunctionAgent(crash), retries=3).run(TASKS[:1])
    assert failures_seen == [1, 2, 3, 1]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_the_first_refusal_for_good_ends_the_run(
    gateway: FakeGateway, client: GatewayClient, status: int
) -> None:
    gateway.always = (status, 0.0)
    runner = EpisodeRunner(client, FunctionAgent(crash), concurrency=1, group_size=8)
    with pytest.raises(RunStopped, match=f"the gateway will not open any episode: {status}: refused"):
        await runner.run_forever(TASKS, asyncio.Event())
    assert gateway.requests["open"] == 1


@pytest.mark.parametrize(
    ("unready", "waits_for"),
    [("", "refused"), ("no engine is ready (starting)", "no engine is ready (starting)")],
)
async def test_a_run_without_a_place_reports_what_it_waits_for(
    gateway: FakeGateway, client: GatewayClient, unready: str, waits_for: str
) -> None:
    gateway.unready = unready
    gateway.refusals.extend([(429, 0.01), (503, 0.01), (429, 0.01)])
    waits: list[str] = []
    await EpisodeRunner(client, FunctionAgent(earn), concurrency=1, on_wait=waits.append).run(TASKS[:1])
    assert waits == [waits_for, ""]


# What is printed


def failed(error: str, number: int) -> EpisodeOutcome:
    return EpisodeOutcome("t", "g", f"ep-{number}", None, error=error, crashes=(error, error))


def test_a_crash_is_printed_once_and_counted_at_the_end() -> None:
    out = io.StringIO()
    with EpisodeProgress(None, Console(file=out, width=300)) as progress:
        for i in range(500):
            progress.add(failed(f"RuntimeError: no response from port {i}", i))
        progress.add(failed("ValueError: boom", 7))
    lines = out.getvalue().splitlines()
    assert [line for line in lines if "failed: " in line and line.startswith("episode ")] == [
        "episode ep-0 failed: RuntimeError: no response from port 0",
        "episode ep-7 failed: ValueError: boom",
    ]
    assert "500 episodes (1000 attempts): RuntimeError: no response from port 0" in lines
    assert "1 episode (2 attempts): ValueError: boom" in lines
    assert len(lines) < 8
    assert progress.summary()["failed"] == 501


def test_a_crash_after_which_the_episode_went_on_is_one_of_its_attempts() -> None:
    out = io.StringIO()
    with EpisodeProgress(None, Console(file=out, width=300)) as progress:
        progress.add(EpisodeOutcome("t", "g", "ep-1", 1.0, attempts=2, crashes=("RuntimeError: boom",)))
    assert out.getvalue().splitlines() == ["attempt 1 of 2 at episode ep-1 failed: RuntimeError: boom"]


def test_the_live_view_has_headings_failures_the_last_error_and_what_is_waited_for() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120)
    progress = EpisodeProgress(16, console)
    progress.add(failed("python ended with 1; stderr:\nTraceback\nValueError: [boom]", 1))
    progress.add(EpisodeOutcome("t", "g", "ep-2", 0.25))
    progress.wait("no slot is free within the staleness bound")
    out.truncate(0)
    console.print(progress.view())
    shown = out.getvalue()
    for words in ("episodes", "reward", "failed", "seconds", "2 of 16", "0.250"):
        assert words in shown
    assert "waiting: no slot is free within the staleness bound" in shown
    assert "last error: python ended with 1: ValueError: [boom]" in shown


# The command line


def episodes_argv(gateway: FakeGateway, tmp_path: Path) -> list[str]:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"task_id": f"t{i}"}) + "\n" for i in range(40)))
    return ["episodes", "run", "--tasks", str(tasks), "--gateway", gateway.url]


async def episodes_run(gateway: FakeGateway, tmp_path: Path, *options: str) -> tuple[int, str, str]:
    argv = [sys.executable, "-m", "gateway.cli", *episodes_argv(gateway, tmp_path), *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    async with within("the command ends"):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command_ends_with_one_sentence_when_its_agent_always_fails(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    options = ["--forever", "--concurrency", "8", "--group-size", "2", "--", *BOOM]
    status, out, err = await episodes_run(gateway, tmp_path, *options)
    assert (status, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith(
        "stopped, because 20 of the last 20 episodes failed; the limit is --max-failures of the driver,"
        " or [run] max_failed_share of the trainer (0.5); the last error: "
    )
    assert last.endswith("ended with 1: ValueError: boom")
    assert err.count("\nTraceback") == 1, "each crash is printed once"
    assert " attempts): AgentCrashed" in err
    assert len(err.splitlines()) < 20
    assert len(gateway.opened) <= LEAST + 8


async def refused(gateway: FakeGateway, tmp_path: Path, *options: str) -> Result:
    """Return the command, in this process: its gateway responds 404, so it starts no agent and handles no signal."""
    gateway.always = (404, 0.0)
    return await gateway_command(*episodes_argv(gateway, tmp_path), *options, "--", *BOOM)


@pytest.mark.parametrize(
    ("options", "warned"), [(["--group-size", "1"], True), ([], False), (["--mode", "eval"], False)]
)
async def test_groups_of_one_are_warned_of(
    gateway: FakeGateway, tmp_path: Path, options: list[str], warned: bool
) -> None:
    done = await refused(gateway, tmp_path, *options)
    assert (done.stderr.count("warning: groups of one episode") == 1) is warned


async def test_a_reward_that_does_not_count_is_a_failure_that_ends_a_run(
    gateway: FakeGateway, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    why = "the agent called no model of this gateway"
    gateway.taken = {"accepted": False, "reason": "no_calls", "trainable_tokens": 0, "notice": why}
    out = io.StringIO()
    with EpisodeProgress(None, Console(file=out, width=300)) as progress:
        runner = EpisodeRunner(client, FunctionAgent(earn), concurrency=1, on_outcome=progress.add)
        with pytest.raises(RunStopped, match=why):
            await runner.run_forever(TASKS, asyncio.Event())
    summary = progress.summary()
    assert (summary["episodes"], summary["failed"], summary["reward_mean"]) == (LEAST, LEAST, None)
    assert f"{why}; closed by the gateway: no_calls" in out.getvalue()


async def test_rewards_of_which_nothing_can_be_trained_are_counted_and_reported_once(
    gateway: FakeGateway, client: GatewayClient
) -> None:
    gateway.taken |= {
        "trainable_tokens": 0,
        "notice": "none of its 9 sampled tokens can be trained (9 greedy)",
    }
    out = io.StringIO()
    with EpisodeProgress(3, Console(file=out, width=300)) as progress:
        await EpisodeRunner(client, FunctionAgent(earn), concurrency=1, on_outcome=progress.add).run(TASKS)
    summary = progress.summary()
    assert (summary["failed"], summary["untrainable"], summary["reward_mean"]) == (0, 3, 1.0)
    assert out.getvalue().count("9 greedy") == 1
