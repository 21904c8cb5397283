"""Agents as processes and functions: how they get tasks, return rewards and die."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headgate.client import agents as module
from headgate.client.agents import (
    AgentCrashed,
    CommandAgent,
    FunctionAgent,
    Reward,
    Task,
    WorkerAgent,
    load_agent,
    read_tasks,
)
from headgate.client.foreign import Exited
from tests.harness.pids import alive
from tests.harness.waiting import LONG_S, TimeLimits, until

TASK = Task("t1", {"task_id": "t1", "question": "6 * 7"})


def command(code: str, timeout_s: float = LONG_S) -> CommandAgent:
    return CommandAgent([sys.executable, "-c", code], timeout_s)


async def run(agent: CommandAgent) -> Reward | None:
    return await agent(TASK, "http://gateway/v1", "key-1")


async def dead(pid: int) -> bool:
    """Wait for the end of a killed process, which is soon but not immediate."""
    await until(lambda: not alive(pid), "the process is gone")
    return True


# Tasks


def test_tasks_are_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task_id": "a", "x": 1}\n\n{"task_id": "b"}\n')
    expected = [Task("a", {"task_id": "a", "x": 1}), Task("b", {"task_id": "b"})]
    assert read_tasks(path) == expected


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"task_id": 3}', '{"task_id": ""}', '{"task_id": "a"}'])
def test_a_bad_task_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"task_id": "a"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl, line 3: "):
        read_tasks(path)


# Functions


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (0.5, Reward(0.5)),
        ({"reward": 2, "components": {"form": 1}}, Reward(2.0, {"form": 1.0})),
        (None, None),
        ({"reward": None}, None),
    ],
)
async def test_a_function_serves_a_number_a_dict_or_nothing(value: object, reward: Reward | None) -> None:
    async def solve(task: dict[str, object], base_url: str, api_key: str) -> object:
        assert (task, base_url, api_key) == (TASK.data, "u", "k")
        return value

    assert await FunctionAgent(solve)(TASK, "u", "k") == reward


@pytest.mark.parametrize(
    "value",
    [
        "1",
        "nan",
        True,
        {"reward": True},
        {"reward": "0.5"},
        {},
        float("nan"),
        float("-inf"),
        {"reward": 1, "components": {"x": float("nan")}},
        {"reward": 1, "components": {"x": True}},
    ],
)
async def test_other_responses_are_crashes(value: object) -> None:
    async def solve(task: dict[str, object], base_url: str, api_key: str) -> object:
        return value

    with pytest.raises(AgentCrashed, match="reward"):
        await FunctionAgent(solve)(TASK, "u", "k")


async def test_a_function_that_ends_its_process_is_a_crash() -> None:
    async def solve(task: dict[str, object], base_url: str, api_key: str) -> float:
        sys.exit(1)

    with pytest.raises(Exited, match=r"sys\.exit\(1\)"):
        await FunctionAgent(solve)(TASK, "u", "k")


async def test_agents_are_loaded_by_file_and_by_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "an_agent.py"
    path.write_text("async def solve(task, base_url, api_key): return 0.25\ndef plain(): ...\n")
    assert await load_agent(f"{path}:solve")(TASK, "u", "k") == Reward(0.25)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert await load_agent("an_agent:solve")(TASK, "u", "k") == Reward(0.25)
    for name in ("an_agent", "an_agent:plain", "an_agent:no", "no_module:f", f"{path}x.py:f"):
        with pytest.raises(ValueError, match=r"\w"):
            load_agent(name)


# Commands


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("print('log'); print(0.75); print()", Reward(0.75)),
        ('print(\'{"reward": 1, "components": {"a": 2}}\')', Reward(1.0, {"a": 2.0})),
        ("print('.5')", Reward(0.5)),
        ("print('{\"reward\": null}')", None),
        ("print('x' * 300000); print(0.5)", Reward(0.5)),
    ],
)
async def test_a_command_prints_its_reward(code: str, reward: Reward | None) -> None:
    assert await run(command(code)) == reward


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("print('done')", 1.0),
        ("pass", 1.0),
        ("print('no'); raise SystemExit(1)", 0.0),
        ("print('true')", 1.0),
        ("print(0.5); raise SystemExit(1)", 0.5),
        ("print(0.25)", 0.25),
    ],
)
async def test_an_exit_status_is_a_reward_for_those_who_ask_for_it(code: str, reward: float) -> None:
    agent = CommandAgent([sys.executable, "-c", code], LONG_S, exit_code_reward=True)
    assert await run(agent) == Reward(reward)


@pytest.mark.parametrize("code", ["raise SystemExit(2)", "print('nan')", "print(1); raise SystemExit(2)"])
async def test_an_exit_status_that_is_neither_0_nor_1_is_a_crash_and_so_is_no_number(code: str) -> None:
    with pytest.raises(AgentCrashed):
        await run(CommandAgent([sys.executable, "-c", code], LONG_S, exit_code_reward=True))


def test_an_exit_status_cannot_be_a_reward_that_graders_compute() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        CommandAgent(["true"], grade=True, exit_code_reward=True)


async def test_the_output_of_a_graded_command_is_not_a_reward_and_only_success_is_graded() -> None:
    def graded(code: str) -> CommandAgent:
        return CommandAgent([sys.executable, "-c", code], LONG_S, grade=True)

    assert await run(graded("print(0.75)")) is None
    with pytest.raises(AgentCrashed, match=r"(?s)with 1.*boom"):
        await run(graded("raise ValueError('boom')"))


async def test_a_command_finds_its_task_in_the_environment() -> None:
    code = (
        "import json, os; task = json.loads(os.environ['HEADGATE_TASK']);"
        "assert os.environ['OPENAI_BASE_URL'] == 'http://gateway/v1';"
        "assert os.environ['OPENAI_API_KEY'] == 'key-1';"
        "print(eval(task['question']))"
    )
    assert await run(command(code)) == Reward(42.0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print(1); import sys; sys.stderr.write('boom\\n'); sys.exit(3)", r"(?s)with 3.*boom"),
        ("print(1); import os; os.kill(os.getpid(), 9)", "with -9$"),
        ("raise ValueError('boom')", r"(?s)with 1.*ValueError: boom"),
        ("print(0.5); raise SystemExit(1)", "with 1"),
        ("print('nan')", "finite"),
        ("print('1e999')", "finite"),
        ("print('0.5 points')", "stated no reward: its last line is '0.5 points'"),
        ("print(0); print('true')", "its last line is 'true'"),
        ("print('\"0.5\"')", "stated no reward"),
        ("print('done')", "stated no reward: its last line is 'done'.*--exit-code-reward"),
        ("pass", "it printed nothing.*--exit-code-reward$"),
        ('print(\'{"reward": "high"}\')', "not 'high'"),
    ],
)
async def test_a_command_crashes(code: str, words: str) -> None:
    with pytest.raises(AgentCrashed, match=words):
        await run(command(code))


async def test_a_command_that_is_not_there() -> None:
    with pytest.raises(AgentCrashed, match="cannot start no-such-command"):
        await run(CommandAgent(["no-such-command"]))


FORKS = """
import subprocess, sys, pathlib, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({path!r}).write_text(str(child.pid))
{then}
"""


async def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, path = TimeLimits(monkeypatch, module), tmp_path / "pid"
    hangs = ["/bin/sh", "-c", f"echo still at it >&2; sleep 600 & echo $! > {path}; wait"]
    running = asyncio.create_task(run(CommandAgent(hangs, 1.0)), name="command")
    await until(lambda: path.exists() and path.read_text().endswith("\n"), "the child runs")
    limits.end()
    words = r"(?s)step 'run the agent's command' was not done within 1 s .*--timeout.*\[rollout\] timeout_s.*still at it"
    with pytest.raises(AgentCrashed, match=words):
        await running
    assert await dead(int(path.read_text()))


async def test_a_command_leaves_no_child_behind_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    started = time.monotonic()
    assert await run(command(FORKS.format(path=str(path), then="print(0.5)"))) == Reward(0.5)
    assert time.monotonic() - started < 600, "waited for the child's end of the pipe"
    assert await dead(int(path.read_text()))


async def test_cancelling_a_command_kills_it_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    agent = command(FORKS.format(path=str(path), then="time.sleep(600)"))
    running = asyncio.create_task(run(agent), name="command")
    await until(lambda: path.exists() and bool(path.read_text()), "the child runs")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await dead(int(path.read_text()))


# Workers

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    ask = json.loads(line)
    do = ask["task"].get("do", "")
    if do == "die": sys.stderr.write("no more\\n"); sys.exit(7)
    if do == "sleep": open(ask["task"]["began"], "w").close(); time.sleep(3600)
    if do == "babble": print("hello", flush=True); continue
    if do == "grade": print('{"reward": null}', flush=True); continue
    if do == "nan": print('{"reward": NaN}', flush=True); continue
    if do == "error": print('{"error": "no idea"}', flush=True); continue
    print(json.dumps({"reward": os.getpid(), "components": {"key": len(ask["api_key"])}}), flush=True)
"""


@pytest.fixture
async def worker() -> AsyncIterator[WorkerAgent]:
    agent = WorkerAgent([sys.executable, "-c", WORKER], timeout_s=LONG_S)
    yield agent
    await agent.close()


async def ask(agent: WorkerAgent, do: str = "", began: str = os.devnull) -> Reward:
    """`began`: a file that it makes when it begins to sleep."""
    reward = await agent(Task("t", {"do": do, "began": began}), "http://gateway/v1", "key-1")
    assert reward is not None
    return reward


async def test_a_worker_serves_many_tasks(worker: WorkerAgent) -> None:
    first, second = await ask(worker), await ask(worker)
    assert first == second == Reward(first.reward, {"key": 5.0})
    assert alive(int(first.reward))
    await worker.close()
    assert await dead(int(first.reward))


async def test_a_worker_may_leave_its_reward_to_the_graders(worker: WorkerAgent) -> None:
    assert await worker(Task("t", {"do": "grade"}), "http://gateway/v1", "key-1") is None


@pytest.mark.parametrize(("do", "words"), [("die", r"(?s)with 7.*no more"), ("babble", "hello")])
async def test_a_worker_that_fails_is_replaced(worker: WorkerAgent, do: str, words: str) -> None:
    first = await ask(worker)
    with pytest.raises(AgentCrashed, match=words):
        await ask(worker, do)
    assert await dead(int(first.reward))
    assert (await ask(worker)).reward != first.reward


@pytest.mark.parametrize(("do", "words"), [("nan", "finite"), ("error", "no idea")])
async def test_a_worker_survives_its_own_errors(worker: WorkerAgent, do: str, words: str) -> None:
    first = await ask(worker)
    with pytest.raises(AgentCrashed, match=words):
        await ask(worker, do)
    assert await ask(worker) == first


async def test_a_cancelled_worker_does_not_serve_the_next_task(worker: WorkerAgent, tmp_path: Path) -> None:
    first, began = await ask(worker), tmp_path / "began"
    asking = asyncio.create_task(ask(worker, "sleep", str(began)), name="ask")
    await until(began.exists, "it is at work")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await dead(int(first.reward))
    assert (await ask(worker)).reward != first.reward


async def test_a_slow_worker_is_replaced() -> None:
    agent = WorkerAgent([sys.executable, "-c", WORKER], timeout_s=0.5)
    with pytest.raises(AgentCrashed, match="step 'wait for an agent worker'"):
        await ask(agent, "sleep")
    await agent.close()


async def test_workers_share_the_tasks() -> None:
    agent = WorkerAgent([sys.executable, "-c", WORKER], workers=2)
    rewards = await asyncio.gather(*(ask(agent) for _ in range(8)))
    await agent.close()
    pids = {int(reward.reward) for reward in rewards}
    assert len(pids) == 2
    assert os.getpid() not in pids
