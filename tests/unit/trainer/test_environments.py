"""Environments that others wrote, from their datasets to a trainer's steps: their rewards are those of the episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headgate.client import EpisodeOutcome, EpisodeRunner, Task
from headgate.client.environment import EnvironmentAgent
from tests.harness.gateways import RunningGateway
from tests.harness.scripted import ScriptedEngine, scripted_gateway
from tests.unit.trainer.runs import loop_of, settings_of, train_one

ROOT = Path(__file__).parents[3]
FOREIGN = ROOT / "tests" / "environments"
EVEN = "0 2 4 6 8 10 12 14 16"


@dataclass(frozen=True)
class Case:
    """An environment, the two replies of the model, and the rewards that they can earn by the environment's own rules."""

    name: str
    replies: tuple[str, str]
    rewards: frozenset[float]
    args: dict[str, Any] = field(default_factory=dict)
    installed: str | None = None
    """The environment of its own that it needs."""


def act(action: int) -> str:
    return f'<tool_call>\n{{"name": "act", "arguments": {{"action": {action}}}}}\n</tool_call>'


CASES = [
    Case(
        "reasoning-gym:chain_sum",
        ("0123456789", "x"),
        frozenset({0.0, 0.01, 0.1, 0.2}),
        {"max_terms": 2, "max_digits": 1, "answer": "whole", "system": ""},
    ),
    Case("gym:CartPole-v1", (act(1), "no more"), frozenset({0.0, 1.0, 2.0, 3.0}), {"max_steps": 3}),
    Case(f"inspect:{FOREIGN}/sums.py@sums", (EVEN, "x"), frozenset({0.0, 1.0}), installed="inspect"),
    Case(
        "verifiers:vf-sums",
        (EVEN, "x"),
        frozenset({0.0, 1.0}),
        {"agent": {"runtime": {"type": "subprocess"}}},
        "verifiers",
    ),
]
INSTALLED = [pytest.mark.clients, pytest.mark.long]
"""Marks of a case that `make test` has no environment for."""
each = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=INSTALLED if c.installed else (), id=c.name.split(":")[0]) for c in CASES],
)


@asynccontextmanager
async def loaded(case: Case, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnvironmentAgent]:
    python = None
    if case.installed:
        python = ROOT / ".venv-environments" / case.installed / "bin" / "python"
        if not python.exists():
            pytest.fail("this test needs an environment of its own: run `make environments`", pytrace=False)
    monkeypatch.setenv("PYTHONPATH", str(FOREIGN))
    agent = EnvironmentAgent(case.name, case.args, python)
    try:
        yield agent
    finally:
        await agent.close()


@asynccontextmanager
async def played(
    gateway: RunningGateway, agent: EnvironmentAgent, tasks: list[Task]
) -> AsyncIterator[list[EpisodeOutcome]]:
    """Groups of two episodes without end, as `gateway episodes run --forever` plays them."""
    outcomes: list[EpisodeOutcome] = []
    runner = EpisodeRunner(
        gateway.admin, agent, group_size=2, concurrency=6, open_wait_s=0.5, on_outcome=outcomes.append
    )
    stop = asyncio.Event()
    work = asyncio.create_task(runner.run_forever(tasks, stop), name="episodes")
    try:
        yield outcomes
    finally:
        stop.set()
        await work


@each
async def test_it_trains_a_model_and_a_scorer_that_errs_fails_its_episode_alone(
    case: Case, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staleness = {"batch": 2, "eta": 1, "min_members": 2}
    async with (
        scripted_gateway(tiny_model, tmp_path, staleness=staleness) as (gateway, engine),
        loaded(case, monkeypatch) as agent,
    ):
        engine.replies.extend(case.replies * 2000)
        tasks = await agent.tasks("train", 12)
        assert len({json.dumps(task.data) for task in tasks}) == 12
        async with (
            played(gateway, agent, tasks) as outcomes,
            loop_of(gateway, settings_of(gateway, tiny_model, tmp_path)) as loop,
        ):
            await train_one(loop)
            await train_one(loop)
        assert (await gateway.admin.status())["version"] == 2
        assert not [outcome.error for outcome in outcomes if outcome.error]
        rewards = {outcome.reward for outcome in outcomes if outcome.reward is not None}
        assert len(rewards) > 1
        assert rewards <= case.rewards
        if case.installed:
            await assert_a_scorer_that_errs_fails_its_episode_alone(gateway, engine, agent)


async def assert_a_scorer_that_errs_fails_its_episode_alone(
    gateway: RunningGateway, engine: ScriptedEngine, agent: EnvironmentAgent
) -> None:
    crashed, good = await one_after_the_other(gateway, engine, agent, ["crash", EVEN])
    assert (crashed.reward, good.reward) == (None, 1.0)
    row = await gateway.admin.episode(str(crashed.episode_id))
    assert row["reason"] in ("grading_failed", "environment_failed")
    assert "the scorer is broken" in row["error"]


async def one_after_the_other(
    gateway: RunningGateway, engine: ScriptedEngine, agent: EnvironmentAgent, replies: list[str]
) -> list[EpisodeOutcome]:
    engine.replies.clear()
    engine.replies.extend(replies)
    runner = EpisodeRunner(gateway.admin, agent, concurrency=1, retries=0, mode="eval")
    return await runner.run(await agent.tasks("train", len(replies)))
