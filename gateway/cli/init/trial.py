"""One episode of an agent against a fake engine, so that a mistake of the agent shows before anything is trained.

Owns a gateway process in a temporary folder, which ends with the trial. Replies are random words: an agent that crashes because
of them is reported like any other.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.cli.demo import CONTEXT, MODEL, save_checkpoint
from gateway.cli.init.project import Environment, OwnAgent, grader_table
from gateway.config.environment import ENVIRONMENT
from headgate.client import Agent, EpisodeOutcome, EpisodeRunner, GatewayClient, Task, load_agent
from headgate.client.agents import CommandAgent, read_tasks
from headgate.client.environment import EnvironmentAgent
from headgate.client.failures import in_a_line
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port

LIMIT_S = 120.0
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of the episode."""

    problem: str = ""
    """What went wrong; empty if the agent called the gateway and has a reward."""
    calls: int = 0
    reward: float | None = None

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        return f"{self.calls} call{'s' * (self.calls != 1)} of the agent, reward {self.reward:g}"


async def try_agent(source: OwnAgent | Environment, notify: Callable[[str], None]) -> Trial:
    """Run an agent at its first task. Raise ValueError if it cannot be loaded, ChildDied and TimeoutError."""
    if isinstance(source, Environment):
        agent: Agent = EnvironmentAgent(source.name, source.args, source.python, LIMIT_S)
    else:
        agent = _agent_of(source)
    try:
        async with _gateway(source.grader, notify) as client:
            return await _episode(client, agent, await _first_task(source, agent), bool(source.grader))
    finally:
        await agent.close()


async def _first_task(source: OwnAgent | Environment, agent: Agent) -> Task:
    if isinstance(source, OwnAgent):
        return read_tasks(source.tasks)[0]
    assert isinstance(agent, EnvironmentAgent)
    return (await agent.tasks("train", 1))[0]


@asynccontextmanager
async def _gateway(grader: str, notify: Callable[[str], None]) -> AsyncIterator[GatewayClient]:
    """Run a gateway with a fake engine."""
    with tempfile.TemporaryDirectory(prefix="headgate-init-") as folder:
        port = free_port()
        file = _gateway_file(grader, Path(folder), port)
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(file)]
        unset = dict.fromkeys(ENVIRONMENT, "")
        process = await LocalProcess.start("the trial's gateway", argv, Path(folder, "gateway.log"), unset)
        try:
            async with GatewayClient(f"http://127.0.0.1:{port}") as client:
                await process.ready(client.is_ready, _START_S, notify)
                yield client
        finally:
            await process.stop()


def _agent_of(source: OwnAgent) -> Agent:
    """Return the agent as the driver runs it. Raise ValueError if it cannot be imported."""
    if source.is_function:
        try:
            return load_agent(source.agent, LIMIT_S)
        except Exception as error:  # of the agent's module
            raise ValueError(f"{source.agent}: {type(error).__name__}: {error}") from error
    by_exit_code = source.reward_source == "exit-code"
    argv = shlex.split(source.agent)
    return CommandAgent(argv, LIMIT_S, grade=bool(source.grader), exit_code_reward=by_exit_code)


def _gateway_file(grader: str, folder: Path, port: int) -> Path:
    save_checkpoint(folder / "model")
    file = folder / "gateway.toml"
    file.write_text(f"""
[server]
port = {port}
[models.{MODEL}]
path = "{folder}/model"
aliases = ["*"]
thinking = false
max_model_len = {CONTEXT}
[engine]
launch = "fake"
log = "{folder}/engine.log"
[store]
url = "sqlite:///{folder}/gateway.db"
[control]
recording = "{folder}/control.jsonl"
{grader_table(grader)}""")
    return file


async def _episode(client: GatewayClient, agent: Agent, task: Task, graded: bool) -> Trial:
    runner = EpisodeRunner(client, agent, concurrency=1, mode="eval", retries=0, describe=graded)
    try:
        async with asyncio.timeout(LIMIT_S):
            (outcome,) = await runner.run([task])
    except TimeoutError:
        return Trial(
            f"it did not end within {LIMIT_S:g} s: random words may not stop an agent of several turns"
        )
    found = await client.episode(outcome.episode_id) if outcome.episode_id else {}
    return Trial(_problem(outcome, found), len(found.get("calls", ())), outcome.reward)


def _problem(outcome: EpisodeOutcome, found: dict[str, object]) -> str:
    """Return what went wrong in an episode; empty if it is rewarded and no call of it was refused."""
    if outcome.error is not None:
        return in_a_line(outcome.error).removeprefix("AgentCrashed: ")
    if outcome.aborted is not None:
        return f"the gateway ended the episode: {outcome.aborted}"
    refused = found.get("refused_calls")
    if isinstance(refused, list) and refused:
        return f"the gateway refused {len(refused)} of its calls, the last with {refused[-1]['status']}: {refused[-1]['message']}"
    return ""
