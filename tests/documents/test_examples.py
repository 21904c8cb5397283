"""Every agent of examples/agents earns its reward from a gateway with scripted replies; each runs as its first lines describe."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from examples.verifiers.environment.till_rows import in_dataset, rows
from examples.verifiers.run import TILL
from examples.verifiers.teacher import careless
from headgate.client import EpisodeRunner, load_agent
from headgate.client.agents import Agent, CommandAgent, Task, read_tasks
from headgate.client.environment import EnvironmentAgent
from tests.harness.records import nodes_of
from tests.harness.scripted import scripted_gateway

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
FOREIGN = ROOT / ".venv-compat" / "agents" / "bin" / "python"
"""The interpreter that has the clients which headgate's own environment lacks."""
VERIFIERS = ROOT / ".venv-environments" / "verifiers" / "bin" / "python"
foreign = [pytest.mark.clients, pytest.mark.long]  # `make test-all` installs what they need

ROOM = 16_384
"""Tokens: a prompt of smolagents has thousands of characters, and here each is a token."""


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


ADD = call("add", a=12, b=30)
SUM = {"task_id": "sum-1", "question": "What is 12 + 30?", "answer": "42"}
GAME = {"task_id": "sum-1"}
ENTRY = {"task_id": "t", "question": "Calculate 5 - 3.", "answer": "2", "metadata": {}}
COMMANDS = {
    "openai_sdk.py": ["42"],
    "curl.sh": ["42"],
    "compacting.py": ["12 and 30", "I add them.", "To do: add the numbers 12 and 30.", "12 + 30 = 42", "42"],
    "anthropic_sdk.py": [ADD, "42"],
    "openai_agents_sdk.py": [ADD, "42"],
    "langgraph_agent.py": [ADD, "42"],
    "smolagents_agent.py": [ADD, call("final_answer", answer="42")],
}
"""The model's words in each of its turns."""
ENVIRONMENTS = {"verifiers_taskset.py"}
BRANCHES = {"smolagents_agent.py", "compacting.py"}
"""smolagents writes its earlier tool calls again, as text: each of its turns begins a branch. A summary begins another one."""
FUNCTIONS = {
    "gymnasium_env.py": (GAME, ["right", "right", "down", "down", "down", "right"]),
    "reasoning_gym_tasks.py": (ENTRY, ["2"]),
}


def command(name: str) -> Agent:
    if name.endswith(".sh"):
        return CommandAgent(["sh", str(AGENTS / name)], exit_code_reward=True)
    elsewhere = name in ("langgraph_agent.py", "smolagents_agent.py")
    return CommandAgent([str(FOREIGN) if elsewhere else sys.executable, str(AGENTS / name)])


async def earned(
    agent: Agent, task: dict[str, object], replies: list[str], model: Path, work: Path
) -> tuple[float, bool]:
    """Run an episode with all `replies`; return its reward, and whether its tokens are one path without branches."""
    models = {"demo": {"path": str(model), "max_model_len": ROOM}}
    async with scripted_gateway(model, work, models=models) as (gateway, engine):
        engine.replies.extend(replies)
        runner = EpisodeRunner(gateway.admin, agent, mode="eval")
        [outcome] = await runner.run([Task(str(task["task_id"]), task)])
        assert outcome.error is None
        assert not engine.replies
        assert outcome.episode_id is not None
        assert outcome.reward is not None
        nodes = await nodes_of(gateway, outcome.episode_id)
        assert sum(node["sampled"] for node in nodes) == len(replies)
        return outcome.reward, [node["parent"] for node in nodes] == list(range(-1, len(nodes) - 1))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=foreign if "gr" in name or "smol" in name else ()) for name in COMMANDS]
)
async def test_a_command_earns_one_for_the_right_answer(name: str, tiny_model: Path, tmp_path: Path) -> None:
    assert await earned(command(name), SUM, COMMANDS[name], tiny_model, tmp_path) == (
        1.0,
        name not in BRANCHES,
    )


@pytest.mark.parametrize("name", ["openai_sdk.py", "curl.sh"])
async def test_a_command_earns_nothing_for_a_wrong_reply(name: str, tiny_model: Path, tmp_path: Path) -> None:
    assert await earned(command(name), SUM, ["41"], tiny_model, tmp_path) == (0.0, True)


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_a_function_earns_the_reward_of_its_environment(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    task, replies = FUNCTIONS[name]
    agent = load_agent(f"{AGENTS / name}:solve")
    assert await earned(agent, task, replies, tiny_model, tmp_path) == (1.0, True)


@pytest.mark.clients
@pytest.mark.long
async def test_a_taskset_of_verifiers_earns_its_own_reward(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(AGENTS))
    block = {"agent": {"runtime": {"type": "subprocess"}}}
    agent = EnvironmentAgent("verifiers:verifiers_taskset", block, VERIFIERS)
    try:
        async with scripted_gateway(tiny_model, tmp_path) as (gateway, engine):
            [task] = await agent.tasks("train", 1)
            index = task.data["index"]
            engine.replies.extend([str(index // 10 + index % 10), "no"])
            runner = EpisodeRunner(gateway.admin, agent, mode="eval")
            outcomes = [*await runner.run([task]), *await runner.run([task])]
            assert [(one.reward, one.error) for one in outcomes] == [(1.0, None), (0.0, None)]
    finally:
        await agent.close()


@pytest.mark.clients
@pytest.mark.long
async def test_the_till_of_verifiers_earns_by_its_rubric(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TILL.folder / "environment"))
    block = {"agent": {"runtime": {"type": "subprocess"}}}
    agent = EnvironmentAgent("verifiers:till", block, VERIFIERS)
    dataset = [row for row in rows() if in_dataset(row)]
    try:
        async with scripted_gateway(tiny_model, tmp_path) as (gateway, engine):
            [task] = await agent.tasks("train", 1)
            first, last = dataset[task.data["index"]].amounts
            engine.replies.extend([f"{first} {last}", f"{first + 1} {last}", f"{first} {last + 1}", "x"])
            runner = EpisodeRunner(gateway.admin, agent, mode="eval", concurrency=1)
            outcomes = await runner.run([task] * 4)
            assert [one.error for one in outcomes] == [None] * 4
            assert [one.reward for one in outcomes] == pytest.approx([1.0, 0.9, 0.1, 0.0])
    finally:
        await agent.close()


def test_the_model_of_the_till_is_shown_no_question_of_the_environment() -> None:
    shown = {question for question, _ in itertools.islice(careless(1), 20_000)}
    assert len(shown) > 3000
    assert not shown & {row.question for row in rows() if in_dataset(row)}


def test_every_agent_is_short_listed_and_tested() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    agents = {path for path in AGENTS.iterdir() if path.suffix in (".py", ".sh") and path.stem != "__init__"}
    assert {path.name for path in agents} == set(COMMANDS) | set(FUNCTIONS) | ENVIRONMENTS
    for path in agents:
        assert len(path.read_text().splitlines()) < 60, path.name
        assert f"(agents/{path.name})" in page
        named = path.stem if path.name in ENVIRONMENTS else path.name
        assert re.search(rf"gateway episodes run .*{named}", path.read_text()), path.name
    assert len(read_tasks(AGENTS / "tasks.jsonl")) >= 4
