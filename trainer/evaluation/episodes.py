"""The episodes of an evaluation: every task of every file `samples` times, by one agent, outside of training.

Training may continue in the meantime, so the result lists the versions that sampled the episodes' tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from headgate.client import (
    Agent,
    EpisodeOutcome,
    EpisodeRunner,
    GatewayClient,
    Task,
    load_agent,
)
from headgate.client.agents import CommandAgent, read_tasks
from headgate.client.environment import EnvironmentAgent
from headgate.configuration import Section
from headgate.types import EpisodeSampling
from trainer.config.eval import EvalSettings
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.evaluation.figures import figures


class Evaluation(Section):
    """One evaluation: its tasks, its agent and its limits."""

    eval: EvalSettings
    agent: str | None
    command: tuple[str, ...] = ()
    reward: str = "agent"
    """The reward of `command`, as `[rollout] reward` states it."""
    env: str | None = None
    env_args: dict[str, Any] = Field(default_factory=dict)
    env_python: Path | None = None
    concurrency: int
    max_failures: float
    timeout_s: float
    model: str | None
    """The trained model; the gateway's first, if None."""

    def load(self) -> Agent:
        """Return the agent, or the environment. Raise ConfigError if there is none of that name."""
        try:
            if self.env is not None:
                return EnvironmentAgent(self.env, self.env_args, self.env_python, self.timeout_s)
            if self.command:
                grade, by_exit_code = self.reward == "grader", self.reward == "exit-code"
                return CommandAgent(self.command, self.timeout_s, grade=grade, exit_code_reward=by_exit_code)
            assert self.agent is not None
            return load_agent(self.agent, self.timeout_s)
        except ValueError as error:
            raise ConfigError(f"the agent of an evaluation: {error}") from error

    @classmethod
    def of(cls, settings: Settings) -> Evaluation:
        """Return the evaluation that the settings describe. Raise ConfigError without an agent or without tasks."""
        wanted, rollout = settings.eval, settings.rollout
        agent = wanted.agent or (rollout and rollout.agent)
        env = rollout.env if rollout and not wanted.agent else None
        command = rollout.command if rollout and not wanted.agent else ()
        if not agent and not env and not command:
            raise ConfigError(
                "an evaluation needs an agent: [rollout] agent, command or env, or [eval] agent"
            )
        if not wanted.tasks and not env:
            raise ConfigError("an evaluation needs tasks: name --tasks FILE, or [eval] tasks")
        return cls(
            eval=wanted,
            agent=agent,
            command=command,
            reward=rollout.reward if rollout else "agent",
            env=env,
            env_args=rollout.env_args if rollout else {},
            env_python=rollout.env_python if rollout else None,
            concurrency=rollout.concurrency if rollout else 64,
            max_failures=settings.run.max_failed_share,
            timeout_s=rollout.timeout_s if rollout else 600.0,
            model=settings.gateway.model,
        )


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The figures, and the outcomes that they are of."""

    result: dict[str, Any]
    outcomes: Sequence[EpisodeOutcome]
    versions: Mapping[str, Sequence[int]]
    """The versions that may have sampled tokens of an episode, by its id."""

    def write(self, path: Path) -> None:
        """Write the result and all outcomes as JSON, atomically."""
        detailed = [
            {**asdict(o), "versions": self.versions.get(o.episode_id or "", ())} for o in self.outcomes
        ]
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        temporary.write_text(json.dumps({**self.result, "outcomes": detailed}, indent=1) + "\n")
        temporary.rename(path)


async def tasks_of(evaluation: Evaluation, agent: Agent) -> dict[str, list[Task]]:
    """Return the tasks by file; those that an environment holds out, by its name, where no file is named. Raise ConfigError."""
    if evaluation.eval.tasks:
        return read(evaluation.eval.tasks)
    assert isinstance(agent, EnvironmentAgent) and evaluation.env is not None
    try:
        return {evaluation.env: await agent.tasks("eval", evaluation.eval.env_tasks)}
    except ValueError as error:
        raise ConfigError(f"[rollout] env: {error}") from error


def read(paths: Sequence[Path]) -> dict[str, list[Task]]:
    """Return the tasks of each file, by its name without ending, or by its path if two have one name. Raise ConfigError."""
    stems = Counter(path.stem for path in paths)
    found: dict[str, list[Task]] = {}
    for path in paths:
        try:
            tasks = read_tasks(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tasks: {error}") from error
        if not tasks:
            raise ConfigError(f"tasks: {path} has no task")
        found[path.stem if stems[path.stem] == 1 else str(path)] = tasks
    if len(found) < len(paths):
        raise ConfigError("tasks: a file is named twice")
    return found


async def evaluate(
    client: GatewayClient,
    evaluation: Evaluation,
    agent: Agent,
    files: Mapping[str, Sequence[Task]],
    on_outcome: Callable[[EpisodeOutcome], None] | None = None,
) -> Evaluated:
    """Run the episodes. Raise RunStopped if too many fail, and GatewayUnreachable."""
    wanted = evaluation.eval
    sampling = EpisodeSampling(
        wanted.temperature, wanted.top_p, seed="ignore" if wanted.samples > 1 else "keep"
    )
    runner = EpisodeRunner(
        client,
        agent,
        group_size=wanted.samples,
        concurrency=evaluation.concurrency,
        mode="eval",
        model=evaluation.model,
        max_failures=evaluation.max_failures,
        sampling=sampling,
        describe=evaluation.reward == "grader",
        on_outcome=on_outcome,
    )
    version = (await client.status(evaluation.model))["version"]
    started = time.monotonic()
    outcomes = await runner.run([task for tasks in files.values() for task in tasks])
    seconds = time.monotonic() - started
    opened = [outcome.episode_id for outcome in outcomes if outcome.episode_id is not None]
    versions = await _versions(client, opened, evaluation.concurrency)
    return Evaluated(summary(outcomes, versions, version, seconds, wanted, files), outcomes, versions)


async def _versions(client: GatewayClient, episodes: Sequence[str], concurrency: int) -> dict[str, list[int]]:
    """Return the versions that may have sampled tokens of each episode, by the gateway's record."""
    free = asyncio.Semaphore(concurrency)

    async def sampled_by(episode_id: str) -> list[int]:
        async with free:
            nodes = (await client.trajectory(episode_id))["nodes"]
        spans = [span for node in nodes if node["sampled"] for span in node["versions"]]
        # A span is the version and the number of tokens, and the newest version that it may be if that is not certain.
        return sorted(
            {version for span in spans for version in (span[0], span[-1] if len(span) > 2 else span[0])}
        )

    return dict(zip(episodes, await asyncio.gather(*map(sampled_by, episodes)), strict=True))


def summary(
    outcomes: Sequence[EpisodeOutcome],
    versions: Mapping[str, Sequence[int]],
    version: int,
    seconds: float,
    settings: EvalSettings,
    files: Mapping[str, Sequence[Task]],
) -> dict[str, Any]:
    """Return the result: the figures of all files together, and in `files` of each.

    `version` is the newest when the evaluation began, and `versions` counts the episodes by the versions (`versions`, by episode)
    that sampled them; an episode of several counts for each.
    """
    by_version = Counter(number for sampled in versions.values() for number in sampled)
    by_file, start = {}, 0
    for name, tasks in files.items():
        numbers = range(start, start + len(tasks))
        own = [outcome for outcome in outcomes if outcome.task_number in numbers]
        by_file[name], start = figures(own, settings), numbers.stop
    return {
        **figures(outcomes, settings),
        "samples": settings.samples,
        "temperature": settings.temperature,
        "seconds": round(seconds, 3),
        "version": version,
        "versions": {str(number): n for number, n in sorted(by_version.items())},
        "files": by_file,
    }
