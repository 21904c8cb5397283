"""`trainer eval`: one episode per task, outside of training, by the agent of `[rollout]`.

Training may go on meanwhile, so the result says which versions the episodes' tokens were sampled by.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.client import EpisodeOutcome, EpisodeRunner, GatewayClient, load_agent
from gateway.client.agents import read_tasks
from trainer.errors import ConfigError
from trainer.loop.children import gateway_process, watch
from trainer.settings import Settings


async def evaluate(settings: Settings, tasks: Path, json_out: Path | None = None) -> None:
    """Prints a table, and as the last line of standard output one JSON object. Raises ConfigError without `[rollout]`."""
    if settings.rollout is None:
        raise ConfigError("eval needs [rollout] agent")
    loaded = read_tasks(tasks)
    async with AsyncExitStack() as stack:
        url, gateway = await gateway_process(stack, settings.gateway, settings.run.dir)
        client = await stack.enter_async_context(GatewayClient(url, settings.gateway.key))
        runner = EpisodeRunner(
            client,
            load_agent(settings.rollout.agent),
            group_size=1,
            concurrency=settings.rollout.concurrency,
            mode="eval",
            model=settings.gateway.model,
        )
        version = (await client.status(settings.gateway.model))["version"]
        started = time.monotonic()
        outcomes = await watch(runner.run(loaded), gateway)
        seconds = time.monotonic() - started
        opened = [outcome.episode_id for outcome in outcomes if outcome.episode_id is not None]
        versions = await _versions(client, opened, settings.rollout.concurrency)
    _report(summary(outcomes, versions, version, seconds), outcomes, versions, json_out)


async def _versions(client: GatewayClient, episodes: Sequence[str], concurrency: int) -> dict[str, list[int]]:
    """The versions that may have sampled tokens of each episode, by the gateway's record."""
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
    outcomes: Sequence[EpisodeOutcome], versions: Mapping[str, Sequence[int]], version: int, seconds: float
) -> dict[str, Any]:
    """The result.

    `reward_mean` is of the episodes with a reward, and None if all failed; in `reward_mean_failed_as_0` a failed episode counts
    as a reward of 0. `version` is the newest when the evaluation began, and `versions` counts the episodes by the versions
    (`versions`, by episode) that sampled them; an episode of several counts for each.
    """
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    by_version = Counter(number for sampled in versions.values() for number in sampled)
    return {
        "reward_mean": _mean(rewards, len(rewards)),
        "reward_mean_failed_as_0": _mean(rewards, len(outcomes)),
        "tasks": len(outcomes),
        "rewarded": len(rewards),
        "failed": len(outcomes) - len(rewards),
        "seconds": round(seconds, 3),
        "version": version,
        "versions": {str(number): n for number, n in sorted(by_version.items())},
    }


def _mean(rewards: Sequence[float], count: int) -> float | None:
    return round(sum(rewards) / count, 6) if count else None


def warnings(result: Mapping[str, Any]) -> list[str]:
    """Reasons why the result's mean is not that of one version on all tasks."""
    told = []
    if failed := result["failed"]:
        told.append(
            f"warning: {failed} of {result['tasks']} episodes failed: reward_mean leaves them out, reward_mean_failed_as_0"
            " counts them as 0"
        )
    versions = result["versions"]
    if versions.keys() - {str(result["version"])}:
        by_version = ", ".join(f"{n} of version {number}" for number, n in versions.items())
        told.append(
            f"warning: the model was updated after the evaluation began at version {result['version']}: the figures are of"
            f" episodes of several versions ({by_version}); for those of one, evaluate while nothing trains"
        )
    return told


def _report(
    result: dict[str, Any],
    outcomes: Sequence[EpisodeOutcome],
    versions: Mapping[str, Sequence[int]],
    json_out: Path | None,
) -> None:
    if json_out is not None:
        detailed = [{**asdict(o), "versions": versions.get(o.episode_id or "", ())} for o in outcomes]
        detail = {**result, "outcomes": detailed}
        json_out.write_text(json.dumps(detail, indent=1) + "\n")
    console = Console()
    table = Table(title="evaluation")
    for name in result:
        table.add_column(name, justify="right")
    table.add_row(*(str(value) for value in result.values()))
    console.print(table)
    for warning in warnings(result):
        console.print(warning, highlight=False, markup=False, soft_wrap=True)
    for error in dict.fromkeys(o.error for o in outcomes if o.error):
        console.print(f"failed: {error}", highlight=False, markup=False)
    # rich would wrap the line.
    console.file.write(json.dumps(result) + "\n")
